"""`gangline data prepare`: input formats, identical stores for any worker count, kills, reported drops."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gangline.errors import UserError
from gangline_basics.data.corpus import FilePart, TextFile
from gangline_dataloader import commands
from gangline_dataloader.prepare import run
from gangline_dataloader.prepare.clean import clean_text
from gangline_dataloader.prepare.inputs import list_inputs
from gangline_dataloader.prepare.prepare_plan import WORK
from gangline_dataloader.prepare.settings import Settings
from gangline_dataloader.store.fields import add_checksum
from gangline_dataloader.store.local import LocalTokens
from gangline_dataloader.store.manifest import VALIDATION, read

# Program that runs `gangline` with a delay in each call of one function.
SLOW = """
import sys, time
from unittest.mock import patch
from pkgutil import resolve_name
was = resolve_name("{0}")
def slow(*words, **named):
    time.sleep({1})
    return was(*words, **named)
with patch("{0}", slow):
    from gangline.cli.main import main
    sys.exit(main(sys.argv[1:]))
"""


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of a store, by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def texts_of(folder: Path) -> list[str]:
    """Return the documents of a byte store."""
    store = LocalTokens(folder)
    everything = np.empty((1, store.total), store.dtype)
    store.copy_windows(np.array([0]), store.total, everything)
    ends = store.find_document_ends(0, store.total)
    return [bytes(part).decode().removesuffix("\0") for part in np.split(everything[0], ends[:-1])]


def test_workers_and_shard_size_do_not_change_tokens(texts, make_store):
    one = make_store(texts, task_bytes=2000)
    two = make_store(texts, task_bytes=2000, workers=2)
    assert contents(one) == contents(two)
    small = make_store(texts, task_bytes=2000, shard_tokens=3000)
    assert len(read(small).shards) > 3
    assert texts_of(small) == texts_of(one)


def test_documents_are_ordered_cleaned_and_deduplicated(texts, make_store):
    store = make_store(texts)
    found = texts_of(store)
    assert len(found) == len(set(found))
    assert "\r" not in "".join(found)
    assert not (store / WORK).exists()
    count = read(store).report["by_source"][str(texts)]
    assert count["files"] == count["documents"] == 63
    assert count["dropped"] == {"duplicate": 1, "empty": 1, "not text": 1}
    held_out = texts_of(store / VALIDATION) if (store / VALIDATION).exists() else []
    assert count["kept"] == len(found) + len(held_out) == 60


def test_document_keeps_split_when_others_are_removed(texts, make_store):
    before = set(texts_of(make_store(texts, validation=0.3) / VALIDATION))
    for path in sorted(texts.glob("*.txt"))[::2]:
        path.unlink()
    after = set(texts_of(make_store(texts, validation=0.3) / VALIDATION))
    assert after < before


def test_killed_prepare_resumes_bitwise(texts, make_store, tmp_path):
    """Kill prepare while tasks are half done, and again while shards are half written."""
    out = tmp_path / "killed"
    undisturbed = make_store(texts)
    for where, seconds, wait in (
        ("gangline_dataloader.prepare.encode.filter_text", 0.05, WORK),
        ("gangline_dataloader.store.write.ShardWriter.write_run", 5, f"{WORK}/choice.json"),
    ):
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                SLOW.format(where, seconds),
                "data",
                "prepare",
                texts,
                "--out",
                out,
                "--workers",
                "1",
            ],
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 240
        while not (out / wait).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert process.poll() is None, "it was to be killed at work"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not (out / "manifest.json").exists()
    assert commands.main(["prepare", str(texts), "--out", str(out), "--workers", "2"]) == 0
    assert contents(out) == contents(undisturbed)


def end_second_task(store: Path, identity: str, stage: int, number: int) -> None:
    """Run a worker's item, but kill the process in task 1, as the system does when memory runs out."""
    if (stage, number) == (0, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    run.run_stage_item(store, identity, stage, number)


def test_killed_worker_is_reported_in_one_message(texts, make_store, tmp_path, monkeypatch):
    settings, out = Settings(task_bytes=20_000), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(run, "run_stage_item", end_second_task)
        with pytest.raises(
            UserError, match=r"a worker process of 2 was killed or crashed, probably for lack of memory"
        ) as error:
            run.prepare([str(texts)], out, settings, 2, lambda *words: None)
    assert "Fewer --workers" in str(error.value)
    assert error.value.exit_code == 1
    run.prepare([str(texts)], out, settings, 1, lambda *words: None)
    assert contents(out) == contents(make_store(texts, task_bytes=20_000))


def test_every_input_format_gives_equal_documents(tmp_path, make_store):
    """Check JSONL files without compression and with three kinds of compression."""
    wanted = [f"Text number {n}, with an ö and a\nnewline." for n in range(5)]
    lines = "".join(json.dumps({"id": n, "body": text}) + "\n\n" for n, text in enumerate(wanted)).encode()
    forms = {
        "a.jsonl": lines,
        "a.jsonl.gz": gzip.compress(lines),
        "a.ndjson.bz2": bz2.compress(lines),
        "a.jsonl.xz": lzma.compress(lines),
    }
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
        assert texts_of(make_store(tmp_path / name, field="body", validation=0)) == wanted, name


@pytest.mark.parametrize("ending", ["bz2", "zst"])
def test_compressed_parquet_rows_are_read(tmp_path, make_store, ending):
    pa, plain = pytest.importorskip("pyarrow"), io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"text": ["one", "two"]}), plain)
    compress = bz2.compress if ending == "bz2" else pytest.importorskip("zstandard").compress
    (tmp_path / f"a.parquet.{ending}").write_bytes(compress(plain.getvalue()))
    assert texts_of(make_store(tmp_path / f"a.parquet.{ending}", validation=0)) == ["one", "two"]


def test_lone_surrogate_is_read_like_data_text(tmp_path, make_store):
    """Check that the surrogate is read and counted as bytes that are not UTF-8."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b?\\ufffd"}\n')
    (content,) = FilePart(TextFile(str(path), path.name, path.stat().st_size)).read()
    for clean in ((), ("unicode",)):
        store = make_store(path, clean=clean, validation=0)
        assert texts_of(store) == [content.decode(errors="replace")] == ["a\ufffd\ufffd\ufffdb?\ufffd"]
        count = read(store).report["by_source"][str(path)]
        assert count["replaced"] == {"bytes that are not UTF-8": 3}


def test_error_names_parquet_row_with_invalid_utf8(tmp_path, make_store):
    pa = pytest.importorskip("pyarrow")
    texts = pa.array([b"one", b"two", b"thr\xff\xfe", b"four"]).cast(pa.binary())
    texts = pa.Array.from_buffers(pa.string(), len(texts), texts.buffers())
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet, row 3, is not UTF-8"):
        make_store(tmp_path / "a.parquet", validation=0)


def test_parquet_with_duplicate_column_is_refused(tmp_path, make_store):
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_arrays([pa.array(["one"]), pa.array(["two"])], names=["text", "text"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="more than one column 'text'"):
        make_store(tmp_path / "a.parquet", validation=0)


def test_empty_name_of_a_field_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(UserError, match="--field is empty: it must name the field"):
        commands.main(["prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "s"), "--field="])


def test_combining_marks_after_control_characters_are_composed():
    assert clean_text("e\0\u0301 \r\n", ["unicode"]) == "é \n"


def test_text_in_another_encoding_is_dropped_or_counted(tmp_path, make_store):
    """Check the rule of data=text: mostly invalid UTF-8 is dropped, and a few invalid bytes are replaced."""
    folder = tmp_path / "in"
    folder.mkdir()
    contents = {
        "cp1251.txt": ("съешь ещё этих мягких булок " * 40).encode("cp1251"),
        "utf16.txt": ("語" * 600).encode("utf-16-le"),
        "noise.txt": np.random.default_rng(0).integers(1, 256, 20_000, dtype=np.uint8).tobytes(),
        "latin1.txt": ("a naïve text, with an � of its own " * 10).encode("latin-1", errors="xmlcharrefreplace"),
        "utf8.txt": ("a naïve text, with an � of its own" * 11).encode(),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    store = make_store(folder, validation=0)
    count = read(store).report["by_source"][str(folder)]
    assert (count["kept"], count["dropped"]) == (2, {"not text": 3})
    assert count["replaced"] == {"bytes that are not UTF-8": 10}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("clean", [(), ("unicode", "length")])
def test_row_with_null_text_is_dropped_and_counted(tmp_path, make_store, form, clean):
    path = tmp_path / f"a.{form}"
    if form == "jsonl":
        path.write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    else:
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.table({"text": ["one", None, "two"]}), path)
    store = make_store(path, validation=0, clean=clean)
    assert texts_of(store) == ["one", "two"]
    assert read(store).report["by_source"][str(path)]["dropped"] == {"no text": 1}


@pytest.mark.parametrize("near", [None, 0.8])
def test_report_counts_bytes_of_kept_documents(tmp_path, make_store, near):
    if near:
        pytest.importorskip("rensa")
    folder = tmp_path / "in"
    folder.mkdir()
    words = " ".join(f"word{n}" for n in range(200))
    for name, text in {"a": words, "b": words, "c": f"{words} more", "d": "something else, ö"}.items():
        (folder / name).write_text(text)
    store = make_store(folder, validation=0, near=near)
    count = read(store).report["by_source"][str(folder)]
    assert count["nbytes"] == sum(len(text.encode()) for text in texts_of(store)) == count["tokens"] - count["kept"]


def test_store_with_all_documents_held_out_is_refused(tmp_path, make_store):
    path = tmp_path / "a.txt"
    path.write_text("a text")
    with pytest.raises(UserError, match="no documents are left for training") as error:
        make_store(path, validation=1 - 1e-9)
    assert "All 1 kept documents are held out for validation (--validation 1)" in str(error.value)
    assert "--validation 0" in str(error.value)


BAD = {
    "no.jsonl": (b'{"text": 5}\n', "line 1"),
    "half.jsonl": (b'{"text": "a"}\n{"text"', "line 2"),
    "list.jsonl": (b"[1]\n", "line 1"),
    "other.jsonl": (b'{"body": "a"}\n', "body"),
    "torn.gz": (gzip.compress(b"text" * 1000)[:-10], "torn.gz"),
    "none.gz": (b"not compressed", "none.gz"),
    "flipped.gz": (gzip.compress(bytes(range(256)) * 40)[:40] + b"\xff" * 30, "flipped.gz"),
}


@pytest.mark.parametrize("name", BAD)
def test_error_names_unreadable_input(name, tmp_path, make_store):
    content, why = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=why):
        make_store(tmp_path / name)


def test_prepare_leaves_unrelated_out_folder_unchanged(texts, make_store, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="or a directory with other files"):
        commands.main(["prepare", str(texts), "--out", str(other)])
    assert [path.name for path in other.iterdir()] == ["mine.txt"]
    store = make_store(texts)
    before = contents(store)
    assert commands.main(["prepare", str(texts), "--out", str(store)]) == 0  # a repeated call changes no file
    with pytest.raises(UserError, match="holds a token store of other inputs or options"):
        commands.main(["prepare", str(texts), "--out", str(store), "--keep-duplicates"])
    assert contents(store) == before


def test_prepare_with_renamed_inputs_refuses_existing_store(texts, tmp_path):
    """Name the same files differently: names decide what is held out, and the report stores the arguments."""
    (texts.parent / "idn").mkdir()
    folder = (texts / "deep").rename(texts.parent / "idn" / "en")
    out, words = tmp_path / "out", ["--validation", "0.3", "--workers", "1"]
    assert commands.main(["prepare", str(folder.parent), "--out", str(out), *words]) == 0
    before = contents(out)
    for named in (str(folder), str(folder.parent) + os.sep):
        with pytest.raises(UserError, match="holds a token store of other inputs or options") as error:
            commands.main(["prepare", named, "--out", str(out), *words])
        assert "was renamed" in str(error.value)
    assert contents(out) == before


@pytest.mark.parametrize("append", [False, True])
def test_store_with_older_identity_format_is_recognized(append, texts, tmp_path, make_store):
    """Write the identity of older versions, which did not include names and sources of files."""
    (tmp_path / "first.txt").write_text("first")
    out = make_store(tmp_path / "first.txt", validation=0) if append else tmp_path / "out"
    words = ["--out", str(out), "--validation", "0.3", "--workers", "1", *(["--append"] if append else [])]
    assert commands.main(["prepare", str(texts / "deep"), *words]) == 0
    document = json.loads((out / "manifest.json").read_text())
    document.pop("checksum")
    call = document["report"]["appended"][0] if append else document["report"]
    call["identity"] = Settings(validation=0.3).compute_older_identity(list_inputs([str(texts / "deep")]))
    (out / "manifest.json").write_text(json.dumps(add_checksum(document)))
    (out / WORK).mkdir()
    (out / WORK / "plan.json").write_text(json.dumps({"identity": call["identity"]}))
    before = contents(out)
    assert commands.main(["prepare", str(texts / "deep"), *words]) == 0
    assert not (out / WORK).exists()
    before.pop(f"{WORK}/plan.json")
    assert contents(out) == before
    if append:
        assert commands.main(["prepare", str(texts / "deep" / "*.txt"), *words]) == 0
        assert len(read(out).report["appended"]) == 2
    else:
        with pytest.raises(UserError, match="holds a token store of other inputs or options"):
            commands.main(["prepare", str(texts / "deep" / "*.txt"), *words])


def test_store_inside_input_folder_is_not_read(texts, capsys):
    command = ["prepare", str(texts), "--out", str(texts / "deep" / "store"), "--workers", "1"]
    assert commands.main(command) == 0
    before, said = contents(texts / "deep" / "store"), capsys.readouterr().out
    assert commands.main(command) == 0
    assert contents(texts / "deep" / "store") == before
    assert capsys.readouterr().out == said
    (texts / "deep" / "store" / "manifest.json").unlink()  # as after a kill just before the end
    (texts / "deep" / "store" / WORK).mkdir()
    assert commands.main(command) == 0
    assert contents(texts / "deep" / "store") == before


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nowhere"], "does not exist"),
        (["{texts}", "--clean", "magic"], "unknown rule magic"),
        (["{texts}", "--workers", "0"], "expected 1"),
        (["{texts}", "--validation", "1"], "fraction"),
        (["{texts}", "--tokenizer", "nothing.json"], "nothing.json"),
        (["{texts}", "{texts}"], "matched twice"),
    ],
)
def test_invalid_arguments_are_refused_before_any_write(words, why, texts, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match=why):
        commands.main(["prepare", *(word.format(texts=texts) for word in words), "--out", str(out)])
    assert not out.exists()


WRONG = {
    "--confidence 0.9": "--confidence 0.9 requires --language.",
    "--language ''": "--language '' contains an empty name.",
    "--language en,": "--language 'en,' contains an empty name.",
    "--language EN": "--language EN: unknown language EN.",
    "--language en --confidence 1.5": "--confidence 1.5 must be between 0 and 1.",
    "--near-duplicates 2": "--near-duplicates 2.0 must be greater than 0 and at most 1.",
    "--validation 1": "--validation 1.0 must be at least 0 and less than 1.",
    "--clean magic": "--clean magic: unknown rule magic.",
    "--clean ''": "--clean '' contains an empty name.",
    "--replace name": "--replace name: unknown kind name.",
    "--replace ''": "--replace '' contains an empty name.",
    "--tokenizer nosuch.json": "--tokenizer nosuch.json cannot be read.",
    "--field ''": "--field is empty: it must name the field that holds the text of each JSONL or Parquet row.",
    "--field nope": "{texts}/rows.jsonl, line 1, has no field 'nope'.",
    "--chat --chat-template t.jinja": "{texts}/a.csv must be JSONL or Parquet.",
    "--cluster local --slurm partition": "--slurm partition: expected KEY=VALUE.",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_option_is_refused_before_the_estimate(options, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text("{{ messages }}")
    folder, out = tmp_path / "in", tmp_path / "new" / "out"
    folder.mkdir()
    (folder / "a.csv").write_text("a,b\n")
    (folder / "rows.jsonl").write_text('{"text": "one", "messages": [{"role": "user", "content": "one"}]}\n')
    with pytest.raises(UserError) as error:
        commands.main(["prepare", str(folder), "--out", str(out), *shlex.split(options)])
    assert error.value.what == WRONG[options].format(texts=folder)
    assert error.value.exit_code == 2
    assert capsys.readouterr().out == ""
    assert not out.parent.exists()


def test_prepare_failing_in_first_task_leaves_no_files(tmp_path, make_store):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one"}\n')
    (folder / "b.jsonl").write_text('{"body": "two"}\n')
    before, out = sorted(tmp_path.rglob("*")), tmp_path / "new" / "deep" / "out"

    def call(**settings) -> None:
        run.prepare([str(folder)], out, Settings(**settings), 1, lambda *progress: None)

    for settings in ({"field": "nope"}, {}):  # error in the first row, then in the second file of a task
        with pytest.raises(UserError, match="has no field"):
            call(**settings)
        assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(UserError, match="has no field"):
        call(task_bytes=1)
    assert (out / WORK / "task-000000.json").exists(), "a finished part is kept for the next call"
    out = make_store(folder / "a.jsonl", validation=0)
    before = contents(out)
    with pytest.raises(UserError, match=r"b\.jsonl, line 1, has no field"):
        commands.main(["prepare", str(folder / "b.jsonl"), "--out", str(out), "--append"])
    assert contents(out) == before


def test_concurrent_prepare_keeps_plan_of_running_call(texts, tmp_path):
    out = tmp_path / "out"
    (out / WORK).mkdir(parents=True)
    with run.lock_store(out):
        (out / WORK / "plan.json").write_text("{}")  # the plan of a call that has just begun
        with pytest.raises(UserError, match="is writing to"):
            commands.main(["prepare", str(texts), "--out", str(out)])
    assert (out / WORK / "plan.json").exists()


def test_append_can_disable_language_filter_of_store(tmp_path):
    (tmp_path / "a.txt").write_text("The harbour was quiet in the morning, and the boats lay still between the stones.")
    (tmp_path / "b.txt").write_text("Der Hafen war am Morgen still, und die Boote lagen ruhig zwischen den Steinen.")
    out = tmp_path / "out"
    common = ["--out", str(out), "--validation", "0", "--workers", "1"]
    sure = ["--language", "en", "--confidence", "0.6", "--replace", "email"]
    assert commands.main(["prepare", str(tmp_path / "a.txt"), *common, *sure]) == 0
    more = ["prepare", str(tmp_path / "b.txt"), "--append", *common]
    assert commands.main([*more, "--confidence", "0.7"]) == 0
    assert read(out).documents == 1
    assert commands.main([*more, "--language", "all", "--replace", "none"]) == 0
    assert read(out).documents == 2


def test_files_are_flushed_before_referencing_document_is_written(texts, tmp_path, monkeypatch):
    """Record flushes: a power loss may lose unflushed content, and names whose directory was not flushed."""
    written: dict[int, str] = {}  # inodes whose content was flushed
    unnamed: set[str] = set()  # files whose directory was not flushed
    folder, documents = str(tmp_path / "out"), []
    rename, flush = os.replace, os.fsync

    def replace(source, target):
        name, parent = os.path.basename(target), os.path.dirname(os.path.abspath(target))
        if os.path.isfile(source):
            assert os.stat(source).st_ino in written, f"{target} is not on the disk"
        if name.endswith(".json") and name != "tokenizer.json":
            lost = [one for one in unnamed if os.path.dirname(one) == parent]
            assert not lost, f"{target} is there before {lost}"
            documents.append(name)
        rename(source, target)
        unnamed.add(os.path.abspath(target))

    def fsync(handle):
        written[os.fstat(handle).st_ino] = ""
        there = os.readlink(f"/proc/self/fd/{handle}")
        unnamed.difference_update([one for one in unnamed if os.path.dirname(one) == there])
        flush(handle)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "fsync", fsync)
    command = ["prepare", str(texts), "--out", folder, "--workers", "1", "--validation", "0.2", "--pack", "64"]
    assert commands.main(command) == 0
    assert documents.count("manifest.json") == documents.count("pack-64.json") == 2
    assert {"plan.json", "choice.json", "task-000000.json", "shard-00000.json"} < set(documents)


ODD = {
    "latin": "caf\xe9 \xfcber".encode("latin-1"),
    "utf-16": "sixteen bits".encode("utf-16"),
    "bom": b"\xef\xbb\xbfafter a mark",
    "nothing": b"",
    "blank": b" \r\n\t",
    "control": b"a\x01b\x7fc\r\rd",
    "half": b"cut in the mid\xc3",
    "long": b"no line ends here " * 200_000,
}


@pytest.mark.parametrize(
    "words", [["prepare", "{texts}"], ["prepare", "--pack", "32"], ["tokenizer", "--vocab-size", "300"]]
)
def test_url_as_out_is_refused(words, texts, tmp_path, monkeypatch):
    """Check also that no directory named after the URL is created."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        UserError, match=r"--out s3://bucket/store must be a path on a local or shared file system, not a URL"
    ):
        commands.main([*(word.format(texts=texts) for word in words), "--out", "s3://bucket/store"])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "words",
    [["prepare", "{texts}"], ["prepare", "--pack", "32"], ["tokenizer", "--vocab-size", "300"], ["export", "{texts}"]],
)
def test_empty_out_option_is_refused(words, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"^--out must be a path, and is empty"):
        commands.main([*(word.format(texts=texts) for word in words), "--out", ""])
    assert sorted(tmp_path.rglob("*")) == before


def test_invalid_bytes_are_replaced_or_dropped_and_counted(tmp_path, make_store):
    folder = tmp_path / "odd"
    folder.mkdir()
    for name, content in ODD.items():
        (folder / f"{name}.txt").write_bytes(content)
    (folder / "empty.jsonl").write_bytes(b"")
    (folder / "long.jsonl").write_bytes(json.dumps({"text": "one row " * 300_000}).encode())
    (folder / "empty.txt.gz").write_bytes(gzip.compress(b""))
    store = make_store(folder, validation=0)
    found = texts_of(store)
    assert {"caf\ufffd \ufffdber", "after a mark", "abc\n\nd", "cut in the mid\ufffd"} < set(found)
    assert sorted(map(len, found))[-2:] == [len("one row ") * 300_000, len(ODD["long"])]
    count = read(store).report["by_source"][str(folder)]
    assert count["dropped"] == {"empty": 3, "not text": 1}
    assert count["documents"] == count["kept"] + 4 == len(found) + 4
