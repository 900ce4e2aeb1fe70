"""Token columns in MDS, Arrow and Parquet files: exact reads, and errors of inconsistent files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gangline.config.check import find_problems
from gangline.errors import UserError
from gangline_dataloader import commands
from gangline_dataloader.sources import build
from gangline_dataloader.store import watch
from gangline_dataloader.store.external import arrow as arrow_tokens, open_tokens
from gangline_dataloader.store.local import LocalTokens
from gangline_testkit.runs import build_small_run

RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(0, 200, n) for n in (5, 90, 1, 300, 44, 7, 260)]
TOKENS = np.concatenate(DOCUMENTS)
ENDS = np.cumsum([len(one) for one in DOCUMENTS])


def array_of_mds(tokens: np.ndarray, kind: str) -> bytes:
    """Encode tokens as the NDArray encoding of streaming does."""
    base, *more = kind.split(":")
    raw = tokens.astype(more[0] if more else "int32" if base == "ndarray" else "int64").tobytes()
    if base == "bytes" or len(more) == 2:
        return raw
    width = 0 if len(tokens) < 256 else 1
    shape = bytes([1 << 2 | width]) + len(tokens).to_bytes(1 << width, "little")
    return (b"" if more else bytes([33])) + shape + raw


def mds(folder: Path, kind: str, documents=DOCUMENTS, change: Callable[[bytes], bytes] = lambda data: data) -> None:
    """Write two MDS shards with a text before the tokens and a number after them.

    `change` edits all arrays but the first of each shard.
    """
    folder.mkdir(exist_ok=True)
    entries = []
    fixed = 4 * int(kind.split(":")[2]) if kind.count(":") == 2 else None
    for number, some in enumerate((documents[:3], documents[3:])):
        samples = []
        for n, tokens in enumerate(some):
            text, data = f"text {n}".encode(), array_of_mds(tokens, kind)
            data = change(data) if n else data
            sizes = [len(text), *([] if fixed else [len(data)])]
            samples.append(np.array(sizes, "<u4").tobytes() + text + data + np.int64(n).tobytes())
        columns = {
            "column_names": ["a_text", "tokens", "z"],
            "column_encodings": ["str", kind, "int"],
            "column_sizes": [None, fixed, 8],
        }
        about = json.dumps(columns).encode()
        head = 4 * (len(some) + 2) + len(about)
        places = np.cumsum([head, *map(len, samples)]).astype("<u4")
        content = np.uint32(len(some)).tobytes() + places.tobytes() + about + b"".join(samples)
        (folder / f"shard.{number:05d}.mds").write_bytes(content)
        entries.append(
            {
                "format": "mds",
                **columns,
                "compression": None,
                "raw_data": {
                    "basename": f"shard.{number:05d}.mds",
                    "bytes": len(content),
                    "hashes": {"sha1": hashlib.sha1(content).hexdigest(), "unknown": "0"},
                },
                "samples": len(some),
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))


def arrow(folder: Path, suffix: str, rows=DOCUMENTS, column: str = "input_ids") -> Path:
    """Write an Arrow or Parquet file with three rows per batch."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = pa.table({"id": list(range(len(rows))), column: [[int(t) for t in row] for row in rows]})
    table = table.cast(pa.schema([("id", pa.int64()), (column, pa.list_(pa.int32()))]))
    folder.mkdir(exist_ok=True)
    path = folder / f"data-00000-of-00001{suffix}"
    if suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=3)
        return path
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    state = {"_data_files": [{"filename": path.name}], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    return path


FORMS: dict[str, Callable[[Path], tuple[Path, str | None]]] = {
    "mds": lambda root: (mds(root, "ndarray:int32"), (root, None))[1],
    "mds of any dtype": lambda root: (mds(root, "ndarray"), (root, None))[1],
    "mds of bytes": lambda root: (mds(root, "bytes"), (root, "tokens:int64"))[1],
    "a saved dataset": lambda root: (arrow(root, ".arrow"), (root, None))[1],
    "an arrow file": lambda root: (arrow(root, ".arrow", column="mine"), "mine"),
    "parquet": lambda root: (arrow(root, ".parquet"), None),
    "a folder of parquet": lambda root: (arrow(root, ".parquet"), (root, None))[1],
}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_and_documents_are_read_exactly(form, tmp_path):
    path, column = FORMS[form](tmp_path / "there")
    store = open_tokens(path, 200, column)
    assert store.total == len(TOKENS)
    starts = np.array([0, 77, 93, len(TOKENS) - 40, 380])
    out = np.empty((5, 40), store.dtype)
    store.copy_windows(starts, 40, out)
    assert np.array_equal(out, np.stack([TOKENS[s : s + 40] for s in starts]))
    assert np.array_equal(store.find_document_ends(0, store.total), ENDS)
    assert [store.find_document(t) for t in (0, 4, 5, 95, 96, 397, 706)] == [0, 0, 1, 2, 3, 4, 6]
    assert store.list_documents(4, 97) == [0, 1, 2, 3]
    assert store.identity == open_tokens(path, 200, column).identity
    with pytest.raises(UserError, match="contains token"):
        open_tokens(path, 150, column).copy_windows(np.array([0]), len(TOKENS), np.empty((1, len(TOKENS)), store.dtype))


def test_negative_token_error_does_not_suggest_larger_vocabulary(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"tokens": [[1, 2, -4]]}), tmp_path / "a.parquet")
    store = open_tokens(tmp_path / "a.parquet", 200, None)
    with pytest.raises(UserError, match="contains token -4") as refused:
        store.copy_windows(np.array([0]), 3, np.empty((1, 3), store.dtype))
    assert "model.vocab_size" not in str(refused.value)


@pytest.mark.parametrize("form", FORMS)
def test_run_reads_every_column_format(form, tmp_path):
    path, column = FORMS[form](tmp_path / "there")
    asked = ("data=tokens", f"data.path={path}", f"data.column={column or 'null'}", "data.document_masking=true")
    run = build_small_run("model.vocab_size=200", "batch.sequence_length=16", *asked)
    assert find_problems(run) == []
    source = build.build_tokens(run.data, run, "train")
    rows = {source.sample(i)["tokens"].tobytes() for i in range(source.count_samples())}
    wanted = [
        TOKENS[n * 16 : n * 16 + 17].astype(source.stores[0].dtype).tobytes() for n in range(source.count_samples())
    ]
    assert rows == set(wanted)


def test_windows_of_a_fixed_size_are_read(tmp_path):
    windows = list(RNG.integers(0, 200, (6, 32)))
    mds(tmp_path / "there", "ndarray:uint32:32", windows)
    store = open_tokens(tmp_path / "there", 200)
    out = np.empty((1, 192), store.dtype)
    store.copy_windows(np.array([0]), 192, out)
    assert np.array_equal(out[0], np.concatenate(windows))


def of_index(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        content = json.loads((folder / "index.json").read_text())
        change(content["shards"][1])
        (folder / "index.json").write_text(json.dumps(content))

    return act


def of_shard(at: int, value: int) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        path = folder / "shard.00001.mds"
        content = bytearray(path.read_bytes())
        content[at : at + 4] = value.to_bytes(4, "little")
        path.write_bytes(content)

    return act


def piped(folder: Path) -> None:
    path = folder / "shard.00001.mds"
    path.unlink()
    os.mkfifo(path)


LIES = {
    "bytes": (of_index(lambda one: one["raw_data"].update(bytes=7)), "shard.00001.mds has"),
    "samples": (of_index(lambda one: one.update(samples=3)), "does not record 3 samples"),
    "columns": (of_index(lambda one: one["column_sizes"].pop()), "column_sizes"),
    "a size": (of_index(lambda one: one.update(column_sizes=[None, None, 4])), "The shard records column_sizes"),
    "a size of 2^63": (of_index(lambda one: one.update(column_sizes=[1 << 63, None, 8])), "column_sizes"),
    "elsewhere": (of_index(lambda one: one["raw_data"].update(basename="../shard")), "basename"),
    "compressed": (of_index(lambda one: one.update(compression="zstd")), "Compressed shards"),
    "a place": (of_shard(8, 9), "do not ascend"),
    "count": (of_shard(0, 9), "does not record"),
    "gone": (lambda folder: (folder / "shard.00001.mds").unlink(), "cannot be read"),
    "torn": (lambda folder: (folder / "shard.00001.mds").write_bytes(b"abc"), "has 3 bytes"),
    "a pipe": (piped, "is not a regular file"),
    "an encoding": (
        of_index(lambda one: one.update(column_encodings=["str", "bytes", "int"])),
        "the index .'str', 'bytes'",
    ),
    "no json": (lambda folder: (folder / "index.json").write_text("{"), "index.json cannot"),
    "no shards": (lambda folder: (folder / "index.json").write_text("{}"), "the list of shards is missing"),
}


@pytest.mark.parametrize("kind", LIES)
def test_inconsistent_mds_index_is_refused(kind, tmp_path):
    mds(tmp_path, "ndarray:int32")
    change, why = LIES[kind]
    change(tmp_path)
    with pytest.raises(UserError, match=why):
        open_tokens(tmp_path, 200)


def test_mds_shard_with_wrong_hash_is_refused(tmp_path):
    mds(tmp_path, "ndarray:int32")
    path = tmp_path / "shard.00001.mds"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1  # a byte of the last token
    path.write_bytes(content)
    store = open_tokens(tmp_path, 1 << 31)
    with pytest.raises(UserError, match=r"shard.00001.mds is damaged: its sha1 is"):
        store.copy_windows(np.array([store.total - 4]), 4, np.empty((1, 4), store.dtype))


def test_a_column_that_holds_no_tokens_is_refused(tmp_path):
    mds(tmp_path / "m", "ndarray:int32")
    mds(tmp_path / "b", "bytes")
    path = arrow(tmp_path / "p", ".parquet", column="mine")
    for there, column, why in (
        (tmp_path / "m", "a_text", "not supported as token column"),
        (tmp_path / "m", "none", "no column none"),
        (tmp_path / "b", None, "bytes with a dtype in data.column"),
        (tmp_path / "b", "tokens:float32", "float32 is not a dtype"),
        (path, None, "the token column of"),
        (path, "id", "lists of integers"),
    ):
        with pytest.raises(UserError, match=why):
            open_tokens(there, 200, column)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="cannot be read"):
        open_tokens(path, 200, "mine")


ARRAYS = {
    "a size": (
        "ndarray:int32",
        lambda data: data[:1] + bytes([data[1] ^ 1]) + data[2:],
        "The header of sample 1 records 91 tokens",
    ),
    "a wider size": (
        "ndarray:int32",
        lambda data: bytes([data[0] | 1]) + data[1:],
        "not a multiple|The header of sample 1 records",
    ),
    "more bytes": (
        "ndarray:int32",
        lambda data: data + bytes(4),
        "The header of sample 1 records 90 tokens, and its bytes hold 91",
    ),
    "a size of a bare array": (
        "ndarray",
        lambda data: data[:2] + b"\7" + data[3:],
        "The header of sample 1 records 7 tokens",
    ),
    "nothing": ("ndarray:int32", lambda data: b"", "too short for the size"),
    "nothing of a bare array": ("ndarray", lambda data: b"", "too short for the dtype"),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_mds_array_with_inconsistent_size_is_refused(kind, tmp_path):
    encoding, change, why = ARRAYS[kind]
    mds(tmp_path, encoding, change=change)
    with pytest.raises(UserError, match=rf"shard\.00000\.mds does not match .*index\.json(.|\n)*({why})"):
        open_tokens(tmp_path, 200)


@pytest.mark.parametrize("shape", ["64", "16", "9" * 30, "4,8"])
def test_mds_array_of_another_static_shape_is_refused(shape, tmp_path):
    mds(tmp_path, "ndarray:uint32:32", list(RNG.integers(0, 200, (6, 32))))
    for path in tmp_path.iterdir():  # the data stays 128 bytes per array
        path.write_bytes(path.read_bytes().replace(b"uint32:32", f"uint32:{shape}".encode()))
    content = json.loads((tmp_path / "index.json").read_text())
    for entry, path in zip(content["shards"], sorted(tmp_path.glob("*.mds")), strict=True):
        entry["raw_data"]["bytes"], grown = path.stat().st_size, len(shape) - 2
        raw = bytearray(path.read_bytes())
        raw[4:20] = (np.frombuffer(raw[4:20], "<u4") + grown).astype("<u4").tobytes()
        path.write_bytes(raw)
    (tmp_path / "index.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="its bytes hold 32" if shape in ("64", "16") else "have the shape"):
        open_tokens(tmp_path, 200)


def test_mds_column_dtype_conflict_is_refused(tmp_path):
    for kind in ("ndarray:int32", "ndarray"):
        mds(tmp_path / kind, kind)
        with pytest.raises(UserError, match=r"data\.column has the dtype int64, and the column has the dtype int32"):
            open_tokens(tmp_path / kind, 200, "tokens:int64")
        assert open_tokens(tmp_path / kind, 200, "tokens:int32").total == len(TOKENS)


@pytest.mark.parametrize("given", ["int32", "uint16", "int8"])
def test_mds_bytes_wider_than_given_dtype_are_refused(given, tmp_path):
    mds(tmp_path, "bytes")
    with pytest.raises(UserError, match=r"seems to hold u?int64 tokens") as refused:
        open_tokens(tmp_path, 200, f"tokens:{given}")
    assert "data.column=NAME:" in str(refused.value)
    assert "int64" in str(refused.value).splitlines()[-1]


# Names of Hub datasets and of files that `datasets` writes next to them; the pattern to give for train.
HUBS = {
    "names": (("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"), "train-*.parquet"),
    "one each": (("train", "validation", "test"), "train.parquet"),
    "behind": (("wiki-train-0", "wiki-train-1", "wiki-validation-0"), "*train*.parquet"),
    "cache": (("train-0", "train-1", "cache-5e1f"), "train-*.parquet"),
    "no split": (("test-0", "data-00", "data-01"), "data-*.parquet"),
}


@pytest.mark.parametrize("kind", HUBS)
def test_error_for_mixed_splits_suggests_path_patterns(kind, tmp_path):
    names, pattern = HUBS[kind]
    folder = tmp_path / "hub"
    for name in names:
        documents = [[1, 2, 3]] * 30 if "train" in name or "data" in name else [[9, 9, 9]] * 30
        arrow(folder, ".parquet", documents).rename(folder / f"{name}.parquet")
    asked = ("model.vocab_size=200", "batch.sequence_length=16", "data=tokens")
    (problem,) = find_problems(build_small_run(*asked, f"data.path={folder}"))
    assert "several splits" in problem.what
    given = [line.strip().replace("'", "") for line in problem.why.splitlines() if "data.path=" in line]
    assert f"data.path={folder}/{pattern}" in given
    run = build_small_run(*asked, f"data.path={folder}/{pattern}")
    assert find_problems(run) == []
    (store,) = build.build_tokens(run.data, run, "train").stores
    assert store.total == 90 * sum("train" in name or "data" in name for name in names)
    total = 0
    for line in given:
        total += open_tokens(line.removeprefix("data.path="), 200).total
    assert total == 90 * len(names), "the patterns part the files"


def test_parent_folder_of_splits_is_refused(tmp_path):
    for split in ("test", "train"):
        arrow(tmp_path / split, ".arrow")
    asked = ("model.vocab_size=200", "batch.sequence_length=16", "data=tokens")
    (problem,) = find_problems(build_small_run(*asked, f"data.path={tmp_path}"))
    assert f"data.path={tmp_path / 'train'}" in problem.why
    assert find_problems(build_small_run(*asked, f"data.path={tmp_path / 'train'}")) == []
    (problem,) = find_problems(build_small_run(*asked, f"data.path={tmp_path}/no-*.parquet"))
    assert "must match Arrow or Parquet files" in problem.what


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_null_token_in_row_is_refused(suffix, dtype, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = pa.array([[5, 6, 7], None, [], [8, None, 9]], pa.list_(getattr(pa, dtype)()))
    for name, some in (("whole", rows[:3]), ("null", rows)):
        table, path = pa.table({"input_ids": some}), tmp_path / f"{name}{suffix}"
        if suffix == ".parquet":
            parquet.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
    assert open_tokens(tmp_path / f"whole{suffix}", 100).shard(0).tolist() == [5, 6, 7]
    with pytest.raises(UserError, match=f"null{suffix}: 1 token.* null"):
        open_tokens(tmp_path / f"null{suffix}", 100).shard(0)


@pytest.mark.parametrize("length", [100, 4000, 1 << 22])
@pytest.mark.parametrize("lie", ["tokens", "offsets", "both"])
def test_arrow_length_beyond_buffer_is_refused(lie, length, tmp_path):
    """Claim lengths beyond the buffer, for which pyarrow would return the memory after it or crash."""
    pa, path = pytest.importorskip("pyarrow"), tmp_path / "a.arrow"
    table = pa.table({"tokens": pa.array([[1, 2, 3]], pa.list_(pa.int32()))})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    content = bytearray(path.read_bytes())
    for name, kind, old in (("tokens", "<i8", [3, 0]), ("offsets", "<i4", [0, 3])):
        there = np.array(old, kind).tobytes()
        if lie in (name, "both"):
            at = content.rindex(there)
            content[at : at + len(there)] = np.array([length if one else 0 for one in old], kind).tobytes()
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.arrow cannot be read"):
        open_tokens(path, 200)


def test_parquet_column_name_with_dot_is_read(tmp_path):
    """Check also a file whose other column has a field of that name, which Parquet writes in the same way."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tokens, other = pa.array([[1, 2], [3]]), pa.array([{"x": [7]}, {"x": [8, 9, 10]}])
    for name, table in (("one", {"tokens.x": tokens}), ("two", {"tokens": other, "tokens.x": tokens})):
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pa.table(table), path)
        store = open_tokens(path, 200, "tokens.x")
        assert (store.total, store.shard(0).tolist()) == (3, [1, 2, 3])


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
@pytest.mark.parametrize("asked", [None, "tokens"])
def test_duplicate_column_names_are_refused(suffix, asked, tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table, path = pa.Table.from_arrays([pa.array([[1, 2]])] * 2, ["tokens"] * 2), tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(UserError, match="has 2 columns called tokens"):
        open_tokens(path, 200, asked)


EMPTY_ROWS = [[1, 2], [], [3], None, [], [], [], [4, 5], [], [], [6]]  # the second batch of three rows has no tokens


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
@pytest.mark.parametrize("column", ["with nulls", "without nulls"])
def test_documents_after_empty_rows_keep_row_numbers(suffix, column, tmp_path):
    rows = EMPTY_ROWS if column == "with nulls" else [row or [] for row in EMPTY_ROWS]
    for name in ("a", "b"):
        write_table(tmp_path / f"{name}{suffix}", {"tokens": rows})
    store = open_tokens(tmp_path, 200)
    assert [store.find_document(t) for t in range(12)] == [0, 0, 2, 7, 7, 10, 11, 11, 13, 18, 18, 21]
    assert store.find_document_ends(0, 12).tolist() == [2, 3, 5, 6, 8, 9, 11, 12], "no empty documents to keep apart"
    assert store.documents == 22
    assert store.list_documents(1, 10) == [0, 2, 7, 10, 11, 13, 18], "those that have tokens there"


def write_table(path: Path, columns: dict, rows: int = 3) -> Path:
    """Write a table in record batches or row groups of `rows` rows."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=rows, write_statistics=path.stem != "no-statistics")
        return path
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


PADDED = {
    "attention_mask": ([1, 1, 0], [1, 1, 1]),
    "loss_mask": ([False, True, True], [True] * 3),
    "completion_mask": ([0, 1, 1], [1, 1, 1]),
    "labels": ([-100, 6, 7], [5, 6, 7]),
}


@pytest.mark.parametrize("beside", PADDED)
@pytest.mark.parametrize("name", ["a.arrow", "a.parquet", "no-statistics.parquet"])
@pytest.mark.parametrize("column", [None, "input_ids"])
def test_rows_with_padding_mask_are_refused(beside, name, column, tmp_path):
    """Put the padding in the last of several batches; without the padding, and without the column, rows are read."""
    untrained, trained = PADDED[beside]
    tokens = [[5, 6, 7]] * 8
    path = write_table(tmp_path / name, {"input_ids": tokens, beside: [trained] * 7 + [untrained]})
    with pytest.raises(UserError, match=rf"{name}: column {beside} contains .* in input_ids") as refused:
        open_tokens(path, 200, column)
    said = str(refused.value)
    assert f"row['{beside}']" in said
    assert f"remove_columns('{beside}')" in said
    for columns in ({beside: [trained] * 8}, {}):
        assert open_tokens(write_table(path, {"input_ids": tokens, **columns}), 200, column).total == 24


def test_class_and_text_labels_are_accepted(tmp_path):
    """Check a class for each row, lists of texts, and nested lists."""
    for labels in ([-1, 0], [["a"], []], [[[-1]], [[0]]]):
        path = write_table(tmp_path / "a.parquet", {"input_ids": [[5, 6, 7]] * 2, "labels": labels})
        assert open_tokens(path, 200).total == 6


@pytest.mark.parametrize("name", ["a.arrow", "no-statistics.parquet"])
@pytest.mark.parametrize("row", [0, 10, 19])
def test_padding_mask_in_large_table_is_detected(name, row, tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_tokens, "PROBED", 8)
    mask = [[1, 1, 1] for _ in range(20)]
    mask[row] = [1, 0, 0]
    path = write_table(tmp_path / name, {"input_ids": [[5, 6, 7]] * 20, "attention_mask": mask})
    with pytest.raises(UserError, match="column attention_mask contains"):
        open_tokens(path, 200)


def test_exported_store_has_equal_tokens_and_documents(texts, make_store, tmp_path):
    folder = make_store(texts, clean=(), shard_tokens=4000)
    assert commands.main(["export", str(folder), "--out", str(tmp_path / "out.bin")]) == 0
    store, theirs = LocalTokens(folder), open_tokens(tmp_path / "out.bin", 256)
    found = []
    for one in (store, theirs):
        tokens = np.empty((1, one.total), one.dtype)
        one.copy_windows(np.array([0]), one.total, tokens)
        found.append((tokens.tolist(), one.find_document_ends(0, one.total).tolist()))
    assert found[0] == found[1]
    with pytest.raises(UserError, match="already exists"):
        commands.main(["export", str(folder), "--out", str(tmp_path / "out")])


def external(folder: Path, kind: str, tokens: np.ndarray) -> Path:
    """Write tokens to a file in a third-party format."""
    if kind == "bin":
        tokens.astype("<u2").tofile(folder / "train.bin")
        return folder / "train.bin"
    if kind == "mds":
        mds(folder, "ndarray:int32", [tokens] * 6)
        return folder / "shard.00000.mds"
    return arrow(folder, f".{kind}", [tokens.tolist()] * 6)


@pytest.mark.parametrize("change", ["in place", "replaced", "removed"])
@pytest.mark.parametrize("kind", ["bin", "mds", "arrow", "parquet"])
@pytest.mark.parametrize("read_before", [True, False])
def test_error_names_external_file_changed_during_run(kind, change, read_before, tmp_path, monkeypatch):
    """Change the file after it was read, or before it is opened for the first time."""
    (tmp_path / "there").mkdir()
    path = external(tmp_path / "there", kind, np.arange(900))
    root = path.parent if kind == "mds" else path
    run = build_small_run("model.vocab_size=4096", "batch.sequence_length=32", "data=tokens", f"data.path={root}")
    now = build.build_tokens(run.data, run, "train")
    if read_before:
        now.fill(np.arange(now.count_samples()))
    content = path.read_bytes()
    if change == "in place":
        path.write_bytes(content[:500] + content[504:508] + content[504:])
        os.utime(path, (1, 1))
    elif change == "replaced":
        external(tmp_path / "there", kind, np.arange(1, 901))
        os.utime(path, (1, 1))
    else:
        path.unlink()
    if read_before:
        clock = watch.time.monotonic() + watch.EVERY
        monkeypatch.setattr(watch.time, "monotonic", lambda: clock)
    with pytest.raises(UserError, match=rf"{path.name} has changed since the run began") as error:
        now.fill(np.arange(now.count_samples()))
    assert "gangline data verify" not in str(error.value), "no store of ours"
    if change != "removed":
        assert "now: 1970-01-01" in str(error.value) or path.stat().st_size != len(content)
