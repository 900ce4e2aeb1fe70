"""`gangline data verify`: shards, tokenizer, packing plans and validation part of a store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from gangline.config.check import find_problems
from gangline.errors import UserError
from gangline_dataloader import commands
from gangline_dataloader.sources import build
from gangline_dataloader.store.fields import CHECKSUM, add_checksum
from gangline_dataloader.store.manifest import FILE, VALIDATION
from gangline_testkit.runs import build_small_run


@pytest.fixture
def store(texts, make_store, tmp_path) -> Path:
    """Return a store with a tokenizer of 257 tokens, a chat template, a plan and a validation part."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["</s>"])
    place = tmp_path / "vocabulary"
    place.mkdir()
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (place / "chat_template.jinja").write_text("{{ messages }}")
    folder = make_store(texts, tokenizer=str(place / "tokenizer.json"), validation=0.2)
    assert commands.main(["prepare", "--out", str(folder), "--pack", "32"]) == 0
    return folder


def opened(store: Path):
    run = build_small_run("model.vocab_size=257", "batch.sequence_length=32", "data=tokens", f"data.path={store}")
    return build.build_tokens(run.data, run, "train")


def swapped(path: Path) -> None:
    """Swap the numbers of two tokens."""
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]
    path.write_text(json.dumps(content))


def of_another(path: Path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(add_checksum({**content, "store": content["store"][::-1]})))


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "another tokenizer": ("tokenizer.json", swapped, "the checksum differs from the manifest"),
    "no tokenizer": ("tokenizer.json", Path.unlink, "the file is missing"),
    "another config": ("tokenizer_config.json", longer, "the checksum differs from the manifest"),
    "another template": (f"{VALIDATION}/chat_template.jinja", longer, "the checksum differs from the manifest"),
    "no template": ("chat_template.jinja", Path.unlink, "the file is missing"),
    "another plan": ("pack-32.json", of_another, "the pack plan belongs to another store"),
    "no plan": ("pack-32.json", Path.unlink, "the file is missing, but other files of the pack plan exist"),
    "no validation manifest": (f"{VALIDATION}/{FILE}", Path.unlink, "missing or incomplete"),
    "no validation": (VALIDATION, shutil.rmtree, "missing or incomplete"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("distant", [False, True])
def test_verify_names_damaged_or_missing_part(kind, distant, store, capsys):
    name, change, why = DAMAGE[kind]
    where = store.as_uri() if distant else str(store)
    assert commands.main(["verify", where]) == 0
    change(store / name)
    capsys.readouterr()
    assert commands.main(["verify", where]) == 1
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "no damage" not in one]
    assert line.startswith(f"{where}/{name.removesuffix(f'/{FILE}')}")
    assert why in line


@pytest.mark.parametrize("flip", ['"file"', '"held_out"', '"sources"', '"kept"', '"end_of_text": 256', '"checksum"'])
def test_verify_refuses_a_manifest_with_a_flipped_bit(flip, store):
    """Check that prepare refuses the manifest too."""
    manifest = store / FILE
    whole = manifest.read_text()
    assert flip in whole
    manifest.write_text(whole.replace(flip, flip[:-2] + chr(ord(flip[-2]) ^ 1) + flip[-1]))
    for words in (["verify", str(store)], ["prepare", "--out", str(store), "--pack", "16"]):
        with pytest.raises(UserError, match=rf"{FILE} is damaged"):
            commands.main(words)


def test_verify_names_a_plan_with_a_flipped_bit(store, capsys):
    plan = store / "pack-32.json"
    content = json.loads(plan.read_text())
    plan.write_text(json.dumps({**content, "padding": content["padding"] ^ 1}))
    assert commands.main(["verify", str(store)]) == 1
    assert "pack-32.json is damaged. The field checksum does not match" in capsys.readouterr().out
    plan.write_text(json.dumps(content).replace(f'"{CHECKSUM}"', '"chebksum"'))
    assert commands.main(["verify", str(store)]) == 1
    assert "pack-32.json is damaged, or of an older version. The field checksum is missing" in capsys.readouterr().out


@pytest.mark.parametrize("lost", [True, False])
def test_suggested_command_restores_plan_of_remote_store(lost, store, tmp_path, capsys):
    """Check the suggestion: the command takes no URL, so a copy of the store is planned and its plan uploaded."""
    name, where = "pack-32.json", store.as_uri()
    if lost:
        (store / name).unlink()
    else:
        (tmp_path / "more.txt").write_text("more " * 99)
        kept = (store / name).read_bytes()
        assert commands.main(["prepare", str(tmp_path / "more.txt"), "--out", str(store), "--append"]) == 0
        (store / name).write_bytes(kept)
    capsys.readouterr()
    assert commands.main(["verify", where]) == 1
    advice = "gangline data prepare --out DIR --pack 32  for a local copy DIR of the store; then upload DIR/*pack-32.*"
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "no damage" not in one]
    assert line.endswith(f"{advice} to {where}")
    sizes = ("model.vocab_size=257", "batch.sequence_length=32", "data=tokens", f"data.cache={tmp_path / 'cache'}")
    (problem, *_) = find_problems(build_small_run(*sizes, f"data.path={where}", "data.packing=best_fit"))
    assert f"{advice} to {where}" in str(problem)
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    assert commands.main(["prepare", "--out", str(copy), "--pack", "32"]) == 0
    for path in copy.glob("*pack-32.*"):
        shutil.copy(path, store)
    assert commands.main(["verify", where]) == 0


def test_a_run_refuses_a_store_with_another_tokenizer(store):
    assert opened(store).count_samples() > 0
    swapped(store / "tokenizer.json")
    with pytest.raises(UserError, match="is not the tokenizer of the tokens"):
        opened(store)


@pytest.mark.parametrize("what", [VALIDATION, f"{VALIDATION}/{FILE}"])
@pytest.mark.parametrize("distant", [False, True])
def test_a_store_without_its_validation_part_is_refused(what, distant, store, texts, tmp_path):
    """Check a run, `show`, and an --append, which would otherwise begin another validation part."""
    (shutil.rmtree if what == VALIDATION else Path.unlink)(store / what)
    where = store.as_uri() if distant else str(store)
    sizes = ("model.vocab_size=257", "batch.sequence_length=32", f"data.cache={tmp_path / 'cache'}")
    (problem,) = find_problems(build_small_run(*sizes, "data=tokens", f"data.path={where}"))
    assert "validation is missing or incomplete" in problem.what
    with pytest.raises(UserError, match="missing or incomplete"):
        commands.main(["show", where])
    if not distant:
        with pytest.raises(UserError, match="missing or incomplete"):
            commands.main(["prepare", str(texts / "deep"), "--out", where, "--append"])


def test_store_without_manifest_checksum_is_refused_as_older(store):
    """Remove other fields that older stores lack too; the message must still name the older version."""
    about = json.loads((store / FILE).read_text())
    del about["held_out"], about["tokenizer"]["beside_xxh3"], about["shards"]["pieces_xxh3"]
    (store / FILE).write_text(json.dumps(add_checksum(about)))
    with pytest.raises(UserError, match="is damaged: beside_xxh3 is None"):
        opened(store)
    del about[CHECKSUM]
    (store / FILE).write_text(json.dumps(about))
    with pytest.raises(UserError, match="is damaged, or of an older version"):
        opened(store)
