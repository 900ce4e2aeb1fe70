"""`gangline data prepare --append`: unchanged shards, no duplicate documents, kills, refused stores."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gangline.errors import UserError
from gangline_dataloader import commands
from gangline_dataloader.packing import pack_plan as plans
from gangline_dataloader.prepare import assemble, choice, prepare_plan, run, settings
from gangline_dataloader.prepare.prepare_plan import PLAN, WORK
from gangline_dataloader.prepare.run import lock_store
from gangline_dataloader.sources import build
from gangline_dataloader.store import manifest as manifests
from gangline_dataloader.store.fields import add_checksum
from gangline_dataloader.store.local import LocalTokens
from gangline_dataloader.store.manifest import FILE, VALIDATION, read
from gangline_testkit.runs import build_small_run


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of a store, by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def letters(folder: Path, letter: str, files: int = 24) -> Path:
    folder.mkdir()
    for number in range(files):
        words = " ".join(f"{letter}{number}{n}" for n in range(12))
        (folder / f"{letter}{number}.txt").write_text(words)
    return folder


def documents(folder: Path) -> list[bytes]:
    store = LocalTokens(folder)
    tokens = np.empty((1, store.total), store.dtype)
    store.copy_windows(np.array([0]), store.total, tokens)
    return [bytes(part) for part in np.split(tokens[0], store.find_document_ends(0, store.total)[:-1])]


def prepared(*words: object) -> None:
    assert commands.main(["prepare", *map(str, words), "--workers", "1"]) == 0


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return two folders and a store of the first one."""
    first, second = letters(tmp_path / "first", "a"), letters(tmp_path / "second", "b")
    (second / "again.txt").write_text((first / "a3.txt").read_text())
    prepared(first, "--out", tmp_path / "store", "--validation", "0.2")
    return first, second, tmp_path / "store"


def test_append_keeps_shards_and_adds_new_documents_once(two, capsys):
    first, second, store = two
    before, identity = contents(store), read(store).compute_identity()
    held_out = documents(store / VALIDATION)
    old = documents(store)
    prepared(second, "--out", store, "--append")
    manifest = read(store)
    assert {name: contents(store)[name] for name in before if name.endswith(".npy")} == {
        name: content for name, content in before.items() if name.endswith(".npy")
    }
    assert manifest.compute_identity() != identity
    assert manifest.match_prefix(identity) == 1
    now, held_now = documents(store), documents(store / VALIDATION)
    assert now[: len(old)] == old
    assert held_now[: len(held_out)] == held_out
    assert len(held_now) > len(held_out)  # the append adds to the validation part of the store
    assert len(now) + len(held_now) == len({*now, *held_now}) == 48
    counts = manifest.report["by_source"]
    assert counts[str(second)]["dropped"] == {"duplicate": 1}
    assert counts[str(first)] == json.loads(before[FILE])["report"]["by_source"][str(first)]
    assert manifest.sources == {str(first): {"files": 24}, str(second): {"files": 25}}
    assert commands.main(["verify", str(store)]) == 0
    whole = contents(store)
    for again in ([first, "--validation", "0.2"], [second, "--append"]):  # both calls were completed before
        prepared(*again, "--out", store)
        assert contents(store) == whole
    third = letters(store.parent / "third", "c")
    prepared(third, "--out", store, "--append")
    assert len(read(store).shards) == 3
    assert read(store).match_prefix(identity) == 1


def test_append_drops_near_duplicates_of_stored_documents(two, tmp_path):
    first, second, store = two
    (second / "near.txt").write_text((first / "a5.txt").read_text() + " and")
    (second / "near-2.txt").write_text((second / "b5.txt").read_text() + " and")
    prepared(second, "--out", store, "--append", "--near-duplicates", "0.8")
    count = read(store).report["by_source"][str(second)]
    assert count["dropped"] == {"duplicate": 1, "near-duplicate": 2}


def test_append_keeps_tokenizer_and_refuses_another(two, tmp_path):
    first, second, _ = two
    for size in (300, 310):
        command = ["tokenizer", str(first), "--vocab-size", str(size), "--out", str(tmp_path / f"{size}.json")]
        assert commands.main(command) == 0
    store = tmp_path / "bpe"
    prepared(first, "--out", store, "--tokenizer", tmp_path / "300.json")
    prepared(second, "--out", store, "--append")
    assert read(store).report["by_source"][str(second)]["kept"] == 24
    for words in (
        ["--tokenizer", tmp_path / "310.json"],
        ["--tokenizer", "bytes"],
        ["--end-of-text", "a"],
        ["--begin-of-text", "a"],
    ):
        with pytest.raises(UserError, match=r"cannot append to .* in the store and .* in this call"):
            prepared(second / "b1.txt", "--out", store, "--append", *words)


def test_append_requires_existing_store(two, tmp_path):
    with pytest.raises(UserError, match="none does not exist"):
        commands.main(["prepare", str(two[1]), "--out", str(tmp_path / "none"), "--append"])


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("data", ["tokens", "mix"])
def test_run_continues_after_append_with_extended_plans(two, data, packing):
    _, second, store = two
    prepared("--out", store, "--pack", "32")
    other = store.parent / "other"
    prepared(letters(store.parent / "third", "c"), "--out", other, "--validation", "0.2", "--pack", "32")
    stores = [f"data.path={store}"]
    if data == "mix":
        stores = [f"data.sources.one={store}", f"data.sources.two={other}", "data.weights={one: 0.8, two: 0.2}"]

    def source(*words: str):
        words = ("model.vocab_size=256", "batch.sequence_length=32", f"data={data}", *stores, *words)
        run = build_small_run(*words, f"data.packing={packing}")
        return getattr(build, f"build_{data}")(run.data, run, "train")

    def samples(source, count: int) -> list[bytes]:
        return [source.sample(i)["tokens"].tobytes() for i in range(count)]

    was = source()
    rows = was.parts[0].count
    epoch = int(rows / (0.8 if data == "mix" else 1)) - 3  # samples before the second epoch of the store
    cursor, state, past = 5, json.loads(json.dumps(was.state(5))), samples(was, epoch)
    files = {name: content for name, content in contents(store).items() if "00000.pack-32" in name}
    prepared(second, "--out", store, "--append")
    assert {name: contents(store)[name] for name in files} == files
    assert plans.read(store, 32).store == read(store).compute_identity()
    assert commands.main(["verify", str(store)]) == 0
    now = source()
    assert now.parts[0].count > rows
    assert now.compute_fingerprint() != was.compute_fingerprint()
    assert now.continues(was.compute_fingerprint(), cursor, state)
    assert samples(now, epoch) == past
    place = now.order(np.arange(4 * epoch))
    mine = place.source == 0
    counts = [len(np.unique(place.row[mine & (place.epoch == number)])) for number in (0, 1)]
    assert counts == [rows, now.parts[0].count], "the epoch under way has its rows, the next one all"
    # The next start reads the grown store, and the past of the run from the checkpoint.
    later = source()
    assert later.continues(now.compute_fingerprint(), cursor + 3, json.loads(json.dumps(now.state(cursor + 3))))
    assert later.compute_fingerprint() == now.compute_fingerprint()
    assert samples(later, 3 * epoch) == samples(now, 3 * epoch)
    assert not source("data.document_masking=true").continues(was.compute_fingerprint(), cursor, state)
    shutil.copytree(other, store, dirs_exist_ok=True)
    assert not source().continues(was.compute_fingerprint(), cursor, state), "another store in its place"


def test_concurrent_append_is_refused(two):
    _, second, store = two
    with lock_store(store), pytest.raises(UserError, match="is writing to"):
        commands.main(["prepare", str(second), "--out", str(store), "--append"])
    assert not (store / WORK).exists()


def test_validation_part_of_killed_append_is_ignored(two, tmp_path, capsys):
    """Restore the manifest from before an append: runs and other appends must not see the new validation part."""
    _, second, store = two
    old, before, held_out = tmp_path / "old", read(store), read(store / VALIDATION)
    shutil.copytree(store, old)
    prepared(second, "--out", store, "--append")
    shutil.copy(old / FILE, store / FILE)
    assert (read(store), read(store / VALIDATION).compute_identity()) == (before, held_out.compute_identity())
    assert commands.main(["verify", str(store)]) == 0
    third = letters(tmp_path / "third", "c")
    prepared(third, "--out", store, "--append")
    prepared(third, "--out", old, "--append")
    for folder in (store, store / VALIDATION):
        assert documents(folder) == documents(old / folder.relative_to(store))


def test_new_validation_part_of_killed_append_is_refused(two, tmp_path, capsys):
    first, second, _ = two
    store, old = tmp_path / "whole", tmp_path / "old"
    prepared(first, "--out", store, "--validation", "0")
    shutil.copytree(store, old)
    words = (second, "--append", "--validation", "0.2")
    prepared(*words, "--out", store)
    wanted = contents(store)
    shutil.copy(old / FILE, store / FILE)
    run = build_small_run("data=tokens", f"data.path={store}", "model.vocab_size=256", "batch.sequence_length=8")
    for split in ("train", "validation"):
        with pytest.raises(UserError, match="validation does not belong to the store"):
            build.build_tokens(run.data, run, split)
    capsys.readouterr()
    assert commands.main(["verify", str(store)]) == 1
    good, line = capsys.readouterr().out.splitlines()
    assert good.endswith("no damage")
    assert line.startswith(f"{store}/validation does not belong to the store {store}.")
    with pytest.raises(UserError, match="validation does not belong to the store"):
        prepared(letters(tmp_path / "third", "c"), "--out", store, "--append")
    assert contents(store)[f"{VALIDATION}/{FILE}"] == wanted[f"{VALIDATION}/{FILE}"]


class Killed(Exception):
    """Stands for the kill of a process."""


def killed_before_the_manifest(monkeypatch: pytest.MonkeyPatch, store: Path, at: Path, *words: object) -> None:
    """Append to a store, and raise Killed when the manifest of folder `at` is about to be written."""
    real = manifests.replace_json

    def replace_json(path: Path, content: dict) -> None:
        if path.parent == at:
            raise Killed
        real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(manifests, "replace_json", replace_json)
        with pytest.raises(Killed):
            prepared(*words, "--out", store, "--append")


def raise_killed(plan: object) -> None:
    raise Killed


@pytest.mark.parametrize("complete", [True, False])
def test_append_removes_validation_part_of_killed_append(two, tmp_path, monkeypatch, complete):
    """Kill an append whose plan says that it made the folder; the part may lack its manifest."""
    first, second, _ = two
    store, other = tmp_path / "whole", tmp_path / "other"
    prepared(first, "--out", store, "--validation", "0")
    shutil.copytree(store, other)
    words = (second, "--validation", "0.2")
    killed_before_the_manifest(monkeypatch, store, store if complete else store / VALIDATION, *words)
    assert (store / VALIDATION / FILE).exists() == complete
    shutil.copytree(store, again := tmp_path / "again")
    third = letters(tmp_path / "third", "c")
    for folder in (store, other):
        prepared(third, "--out", folder, "--append", "--validation", "0")
    assert not (store / VALIDATION).exists()
    assert contents(store) == contents(other)
    run = build_small_run("data=tokens", f"data.path={store}", "model.vocab_size=256", "batch.sequence_length=8")
    build.build_tokens(run.data, run, "train")
    assert commands.main(["verify", str(store)]) == 0
    prepared(*words, "--out", store, "--append")
    prepared(*words, "--out", again, "--append")  # repeating the killed call completes it
    assert read(again).held_out
    assert commands.main(["verify", str(again)]) == 0


@pytest.mark.parametrize("folder", [VALIDATION, WORK])
def test_killed_append_restarts_after_partial_removal(two, tmp_path, monkeypatch, folder):
    """Stop the removal after the shards: a missing shard must not pass for a shard of that name in the store."""
    first, second, _ = two
    store, wanted = tmp_path / "whole", tmp_path / "wanted"
    prepared(first, "--out", store, "--validation", "0")
    shutil.copytree(store, wanted)
    words = (second, "--append", "--validation", "0.2")
    prepared(*words, "--out", wanted)
    killed_before_the_manifest(monkeypatch, store, store, second, "--validation", "0.2")
    shards = store / folder / ("." if folder == VALIDATION else "shards")
    real = shutil.rmtree

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if path == store / folder:
            for one in shards.glob("*.npy"):
                one.unlink()
            raise Killed
        real(path, ignore_errors)

    third = letters(tmp_path / "third", "c")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        with pytest.raises(Killed):
            prepared(third, "--out", store, "--append", "--validation", "0")
    prepared(*words, "--out", store)
    assert contents(store) == contents(wanted)


@pytest.mark.parametrize("manifest", [True, False])
def test_append_keeps_unrelated_validation_folder(two, tmp_path, monkeypatch, manifest):
    """Check a folder that exists before the call, also after another killed call, or that appears during the call."""
    first, second, elsewhere = two
    store = tmp_path / "whole"
    prepared(first, "--out", store, "--validation", "0")
    third = letters(tmp_path / "third", "c")
    killed_before_the_manifest(monkeypatch, store, store, third, "--validation", "0")
    assert (store / WORK / PLAN).exists()
    mine = store / VALIDATION
    if manifest:
        shutil.copytree(elsewhere, mine)
    else:
        mine.mkdir()
        (mine / "notes.txt").write_text("mine")
    kept = contents(mine)
    for words in ((second, "--validation", "0.2"), (third, "--validation", "0.5")):
        with pytest.raises(UserError, match=r"is not the validation part of the store|does not belong"):
            prepared(*words, "--out", store, "--append")
        assert contents(mine) == kept
    shutil.rmtree(mine)
    real = choice.choose

    def choose(plan):
        real(plan)
        shutil.copytree(elsewhere, mine) if manifest else (mine.mkdir(), (mine / "notes.txt").write_text("mine"))

    monkeypatch.setattr(choice, "choose", choose)
    with pytest.raises(UserError, match="is not the validation part of the store"):
        prepared(second, "--validation", "0.2", "--out", store, "--append")
    assert contents(mine) == kept


def upgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the version of the --clean rules, so that they count as changed from now on."""
    for module in (settings, prepare_plan, assemble, run):
        monkeypatch.setattr(module, "RULES_VERSION", settings.RULES_VERSION + 1, raising=False)


def test_repeated_calls_after_rules_upgrade_change_no_files(two, monkeypatch):
    first, second, store = two
    prepared(second, "--out", store, "--append")
    whole = contents(store)
    upgraded(monkeypatch)
    prepared(first, "--out", store, "--validation", "0.2")
    prepared(second, "--out", store, "--append")
    assert contents(store) == whole


def test_append_refuses_a_store_that_older_rules_cleaned(two, tmp_path, monkeypatch):
    first, second, store = two
    plain = tmp_path / "plain"
    prepared(first, "--out", plain, "--clean", "none")
    about = json.loads((plain / FILE).read_text())
    del about["report"]["rules"]  # as in an older store
    (plain / FILE).write_text(json.dumps(add_checksum(about)))
    prepared(second / "b1.txt", "--out", plain, "--append")
    prepared(second / "b2.txt", "--out", plain, "--append", "--clean", "unicode")
    upgraded(monkeypatch)
    for folder in (store, plain):
        with pytest.raises(UserError, match="the rules of --clean, --language and --replace have changed"):
            prepared(second, "--out", folder, "--append", "--clean", "length")
        prepared(second, "--out", folder, "--append", "--clean", "none")


@pytest.mark.parametrize("clean", ["none", "unicode"])
def test_killed_prepare_restarts_if_cleaning_rules_changed(two, tmp_path, monkeypatch, clean):
    first, _, _ = two
    store = tmp_path / "killed"
    monkeypatch.setattr(choice, "choose", raise_killed)
    with pytest.raises(Killed):
        prepared(first, "--out", store, "--clean", clean)
    before = (store / WORK / "task-000000.json").stat().st_mtime_ns
    upgraded(monkeypatch)
    with pytest.raises(Killed):
        prepared(first, "--out", store, "--clean", clean)
    assert ((store / WORK / "task-000000.json").stat().st_mtime_ns == before) == (clean == "none")


@pytest.mark.parametrize("share", ["0", "0.2"])
def test_prepare_refuses_the_validation_folder_of_a_store(two, tmp_path, share, capsys):
    """Check that no documents can be added there, while packing plans of the part are made there."""
    first, second, _ = two
    store = tmp_path / "whole"
    prepared(first, "--out", store, "--validation", share)
    before = contents(store)
    capsys.readouterr()
    for more in ([], ["--append"]):
        with pytest.raises(UserError, match="is the validation part of the store"):
            prepared(second, "--out", store / VALIDATION, *more)
        assert contents(store) == before
        assert not capsys.readouterr().out, "refused before anything is done"
    if share != "0":
        prepared("--out", store / VALIDATION, "--pack", "8")


def test_prepare_refuses_unrelated_validation_folder_in_unfinished_store(two, tmp_path, monkeypatch):
    first, _, elsewhere = two
    store = tmp_path / "fresh"
    (store / WORK).mkdir(parents=True)
    shutil.copytree(elsewhere, store / VALIDATION)
    kept = contents(store / VALIDATION)
    for share in ("0", "0.2"):
        with pytest.raises(UserError, match="is not the validation part of the store"):
            prepared(first, "--out", store, "--validation", share)
        assert contents(store / VALIDATION) == kept


def test_validation_part_read_during_append_matches_manifest(two, tmp_path, monkeypatch):
    """Append after the store manifest is read: the longer part must be read as that manifest records it."""
    _, second, store = two
    new, before = tmp_path / "new", read(store / VALIDATION).compute_identity()
    shutil.copytree(store, new)
    prepared(second, "--out", new, "--append")
    assert read(new / VALIDATION).compute_identity() != before
    real, reads = manifests._read, []

    def read_one(folder: Path):
        found = real(folder)
        if not reads:
            shutil.copytree(new, store, dirs_exist_ok=True)
        reads.append(folder)
        return found

    monkeypatch.setattr(manifests, "_read", read_one)
    assert read(store / VALIDATION).compute_identity() == before
    assert reads == [store, store / VALIDATION]


def test_validation_part_is_recognized_from_relative_path(two, tmp_path, monkeypatch):
    """Read the part as `.`, a path without the name of the folder."""
    _, second, store = two
    shutil.copy(store / FILE, tmp_path / FILE)
    before = read(store / VALIDATION).compute_identity()
    prepared(second, "--out", store, "--append")
    shutil.copy(tmp_path / FILE, store / FILE)
    monkeypatch.chdir(store / VALIDATION)
    assert read(".").compute_identity() == before


def test_validation_part_of_another_store_is_named(two, tmp_path, capsys):
    _, second, store = two
    prepared(second, "--out", tmp_path / "other", "--validation", "0.2")
    shutil.rmtree(store / VALIDATION)
    shutil.copytree(tmp_path / "other" / VALIDATION, store / VALIDATION)
    capsys.readouterr()
    assert commands.main(["verify", str(store)]) == 1
    assert f"{store}/validation is not the validation part of the store {store}." in capsys.readouterr().out
    (store / VALIDATION / FILE).write_text("{")
    assert commands.main(["verify", str(store)]) == 1
    assert f"{store}/validation/{FILE} is damaged" in capsys.readouterr().out


def test_verify_names_plan_that_lacks_appended_shards(two, capsys):
    _, second, store = two
    prepared("--out", store, "--pack", "8")
    kept = contents(store)
    prepared(second, "--out", store, "--append")
    whole = contents(store)
    assert commands.main(["verify", str(store)]) == 0
    # The second call repeats the one that was killed before its plans.
    for finish in (("--pack", "8"), (second, "--append")):
        (store / "pack-8.json").write_bytes(kept["pack-8.json"])
        assert commands.main(["verify", str(store)]) == 1
        assert (
            "pack-8.json: the pack plan covers 1 of 2 shards, probably because an --append was killed: repeat that "
            f"--append, or plan all shards:  gangline data prepare --out {store} --pack 8"
        ) in capsys.readouterr().out
        prepared(*finish, "--out", store)
        assert commands.main(["verify", str(store)]) == 0
        assert contents(store) == whole


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("append", [False, True])
def test_call_killed_at_any_moment_resumes_bitwise(every, append, two, tmp_path):
    """Kill prepare at file system events; a store that is appended to must be complete after each kill."""
    _, second, store = two
    words = ["prepare", str(second), "--workers", "1", *(["--append"] if append else ["--validation", "0.2"])]
    script = [sys.executable, str(Path(__file__).with_name("killed.py"))]
    reference, out = tmp_path / "reference", tmp_path / "out"
    if append:
        shutil.copytree(store, reference)
    assert commands.main([*words, "--out", str(reference)]) == 0
    command = [*script, str(every), str(store) if append else "-", str(reference), str(out), *words]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr + told.stdout
    assert int(told.stdout.split()[-2]) >= 60 / every
