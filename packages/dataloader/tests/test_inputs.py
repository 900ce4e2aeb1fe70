"""Input folders of `gangline data prepare`: train, validation and test splits, and plain text files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gangline import UserError
from gangline_dataloader import commands
from gangline_dataloader.prepare.documents import check_first_row
from gangline_dataloader.prepare.inputs import list_inputs
from gangline_dataloader.store.manifest import VALIDATION, read


def rows(path: Path, name: str, count: int = 10) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": f"{name} row {n} of the data set"}) + "\n" for n in range(count)))


LAYOUTS = {
    "files": ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/{}-00000-of-00001.jsonl"),
    "folders": ("train/0000.jsonl", "train/0001.jsonl", "{}/0000.jsonl"),
    "names": ("train.jsonl", "train_more.jsonl", "my_{}.jsonl"),
    "parts of a data set": ("de/train-0.jsonl", "en/train-0.jsonl", "en/{}-0.jsonl"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prepare_skips_test_split_and_holds_out_validation(layout, tmp_path, capsys):
    folder, out = tmp_path / "set", tmp_path / "out"
    first, second, other = LAYOUTS[layout]
    rows(folder / first, "first")
    rows(folder / second, "second")
    rows(folder / other.format("validation"), "held")
    rows(folder / other.format("test"), "secret")
    (folder / "README.md").write_text("It is about rows.")
    assert commands.main(["prepare", str(folder), "--out", str(out), "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "validation is held out, test (1 files), plain text files (1 files) skipped" in said
    stored, held = ((out / place / "shard-00000.npy").read_bytes() for place in ("", VALIDATION))
    assert (read(out).documents, read(out / VALIDATION).documents) == (20, 10)
    assert stored.count(b"first") == stored.count(b"second") == held.count(b"held") == 10
    assert b"secret" not in stored + held
    assert b"about" not in stored + held


def test_folder_without_validation_split_holds_out_share(tmp_path, make_store):
    rows(tmp_path / "set" / "train.jsonl", "train", 200)
    rows(tmp_path / "set" / "test.jsonl", "test")
    store = make_store(tmp_path / "set", validation=0.2)
    assert 20 <= read(store / VALIDATION).documents <= 60
    assert read(store).documents + read(store / VALIDATION).documents == 200


def test_test_split_is_read_if_explicit_or_alone(tmp_path):
    for name in ("a/test.jsonl", "b/more.jsonl", "b/tests.jsonl", "c/train.py", "c/test.py", "c/validation/x.jsonl"):
        rows(tmp_path / name, name)
    for name in "abc":
        there = [one for one in (tmp_path / name).rglob("*") if one.is_file()]
        assert len(list_inputs([str(tmp_path / name)])) == len(there)
    rows(tmp_path / "a/train.jsonl", "train")
    assert [file.name for file in list_inputs([str(tmp_path / "a")])] == ["train.jsonl"]
    assert len(list_inputs([str(tmp_path / "a/train.jsonl"), str(tmp_path / "a/test.jsonl")])) == 2


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.tsv.gz"])
def test_table_read_as_plain_text_is_reported(name, tmp_path):
    told: list[str] = []
    (tmp_path / "b.txt").write_text("text")
    list_inputs([str(tmp_path)], say=told.append)
    assert told == []
    (tmp_path / name).write_bytes(b"x")
    list_inputs([str(tmp_path)], say=told.append)
    (line,) = told
    assert line.startswith(f"{tmp_path}: reading {name} as plain text")


@pytest.mark.parametrize(("row", "fields"), [("{}", "none"), ('{"body": "one", "id": 1}', "body, id")])
def test_missing_field_error_lists_fields_of_row(row, fields, tmp_path):
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    with pytest.raises(UserError) as error:
        check_first_row(list_inputs([str(tmp_path)]), "text", chat=False)
    assert error.value.what == f"{tmp_path}/rows.jsonl, line 1, has no field 'text'."
    assert error.value.details == (f"Fields: {fields}.", "--field NAME")
