"""Megatron, NumPy and raw token files: exact reads, and errors of inconsistent files."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from gangline.config.check import find_problems
from gangline.errors import UserError
from gangline_dataloader import commands
from gangline_dataloader.sources import build
from gangline_dataloader.store.external import open_tokens
from gangline_testkit.runs import build_small_run

RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(0, 200, n) for n in (5, 90, 1, 300, 44)]
TOKENS = np.concatenate(DOCUMENTS)


def nanogpt(path: Path) -> None:
    path.write_bytes(TOKENS.astype("<u2").tobytes())


def llm_c(path: Path, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> None:
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(TOKENS)
    path.write_bytes(head.tobytes() + TOKENS.astype(dtype).tobytes())


def llama(path: Path) -> None:
    llm_c(path, 20240801, 7, "<u4")


def megatron(path: Path, dtype: str = "<i4", code: int = 4) -> None:
    """Write Megatron files with one sequence per document, but two sequences in the first document."""
    lengths = [2, 3, *(len(one) for one in DOCUMENTS[1:])]
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * np.dtype(dtype).itemsize
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), 6)
    index += np.array(lengths, "<i4").tobytes() + pointers.astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index + np.array([0, 2, 3, 4, 5, 6], "<i8").tobytes())
    path.write_bytes(TOKENS.astype(dtype).tobytes())


@pytest.mark.parametrize("write", [nanogpt, llm_c, llama, megatron])
def test_tokens_are_read_exactly(write, tmp_path):
    path = tmp_path / "train.bin"
    write(path)
    store = open_tokens(path, 200)
    out = np.empty((3, 40), store.dtype)
    starts = np.array([0, 77, len(TOKENS) - 40])
    store.copy_windows(starts, 40, out)
    assert np.array_equal(out, np.stack([TOKENS[s : s + 40] for s in starts]))
    assert store.total == len(TOKENS)
    if write is megatron:
        ends = np.cumsum([len(one) for one in DOCUMENTS])
        assert np.array_equal(store.find_document_ends(0, store.total), ends)
        assert [store.find_document(t) for t in (0, 4, 5, 95, 96)] == [0, 0, 1, 2, 3]
    assert store.identity == open_tokens(path, 200).identity
    with pytest.raises(UserError, match=r"train\.bin contains token"):
        open_tokens(path, 150).copy_windows(np.array([0]), len(TOKENS), np.empty((1, len(TOKENS)), store.dtype))


@pytest.mark.parametrize("write", [nanogpt, llm_c, megatron])
def test_run_reads_external_files(write, tmp_path):
    path = tmp_path / "train.bin"
    write(path)
    run = build_small_run("model.vocab_size=200", "batch.sequence_length=16", "data=tokens", f"data.path={path}")
    assert find_problems(run) == []
    source = build.build_tokens(run.data, run, "train")
    rows = {source.sample(i)["tokens"].tobytes() for i in range(source.count_samples())}
    wanted = [
        TOKENS[n * 16 : n * 16 + 17].astype(source.stores[0].dtype).tobytes() for n in range(source.count_samples())
    ]
    assert rows == set(wanted)
    apart = build_small_run(
        "model.vocab_size=200",
        "batch.sequence_length=16",
        "data=tokens",
        f"data.path={path}",
        "data.document_masking=true",
    )
    said = [problem.what for problem in find_problems(apart)]
    assert said == [] if write is megatron else "needs the ends of documents" in said[0]


def test_megatron_document_numbers_include_empty_documents(tmp_path):
    path, lengths = tmp_path / "train.bin", [0, 2, 0, 0, 3, 1, 0]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 7, 7)  # sequences 4 and 5 are one document
    pointers = (np.cumsum(lengths) - lengths) * 4
    index += np.array(lengths, "<i4").tobytes() + pointers.astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index + np.array([0, 1, 2, 3, 4, 6, 7], "<i8").tobytes())
    path.write_bytes(np.arange(6, dtype="<i4").tobytes())
    store = open_tokens(path, 200)
    assert [store.find_document(t) for t in range(6)] == [1, 1, 4, 4, 4, 4]
    assert store.find_document_ends(0, 6).tolist() == [2, 6]
    assert (store.documents, store.list_documents(0, 6)) == (6, [1, 4])


def lie(at: int, form: str, value: int):
    def change(path: Path) -> None:
        index = path.with_suffix(".idx")
        content = bytearray(index.read_bytes())
        struct.pack_into(form, content, at, value)
        index.write_bytes(content)

    return change


LIES = {
    "magic": (lie(0, "<B", 1), "does not begin"),
    "version": (lie(9, "<Q", 2), "Version 2"),
    "dtype": (lie(17, "<B", 7), "dtype 7"),
    "wider": (lie(17, "<B", 5), "one after another"),
    "sequences": (lie(18, "<Q", 7), "bytes"),
    "many": (lie(18, "<Q", 1 << 60), "bytes"),
    "boundaries": (lie(26, "<Q", 5), "bytes"),
    "length": (lie(34, "<i", 3), "one after another"),
    "negative": (lie(34, "<i", -2), "a negative number of tokens"),
    "last length": (lie(34 + 20, "<i", 45), "bytes"),
    "pointer": (lie(34 + 24 + 8, "<q", 4), "one after another"),
    "document": (lie(34 + 72 + 8, "<q", 9), "do not ascend"),
    "torn": (lambda path: path.write_bytes(path.read_bytes()[:-4]), "train.bin has"),
    "empty index": (lambda path: path.with_suffix(".idx").write_bytes(b""), "does not begin"),
    "gone": (lambda path: path.unlink(), "train.bin cannot be read"),
}


@pytest.mark.parametrize("kind", LIES)
def test_inconsistent_megatron_index_is_refused(kind, tmp_path):
    path = tmp_path / "train.bin"
    megatron(path)
    change, why = LIES[kind]
    change(path)
    with pytest.raises(UserError, match=why) as error:
        open_tokens(path, 200)
    assert "train." in str(error.value)


def test_inconsistent_header_is_refused(tmp_path):
    path = tmp_path / "train.bin"
    llm_c(path)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=f"records {len(TOKENS)} tokens"):
        open_tokens(path, 200)
    llm_c(path, version=3)
    with pytest.raises(UserError, match="version 3"):
        open_tokens(path, 200)
    for content, why in ((b"abc", "uint16"), (b"", "no tokens")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=why):
            open_tokens(path, 200)
    with pytest.raises(UserError, match="cannot be read"):
        open_tokens(tmp_path / "none.bin", 200)


def test_raw_uint32_tokens_require_explicit_dtype(tmp_path):
    path, tokens = tmp_path / "u32.bin", RNG.integers(0, 100_000, 5000)
    tokens.astype("<u4").tofile(path)
    for vocab_size, why in (
        (100_000, "model.vocab_size=100000"),
        (50_304, "Read as uint16, every second value is almost 0"),
    ):
        with pytest.raises(UserError, match="uint16 or uint32") as error:
            open_tokens(path, vocab_size)
        assert why in str(error.value)
        assert "data.column=:uint32" in str(error.value)
    store = open_tokens(path, 100_000, ":uint32")
    assert np.array_equal(store.shard(0), tokens)
    with pytest.raises(UserError, match="has no columns"):
        open_tokens(path, 100_000, "tokens")


@pytest.mark.parametrize("column", [":int32", ":uint32", ":int64"])
def test_raw_tokens_of_a_named_dtype_are_read(column, tmp_path):
    path, tokens = tmp_path / "train.bin", RNG.integers(0, 100_000, 5000)
    tokens.astype(column[1:]).tofile(path)
    store = open_tokens(path, 100_000, column)
    assert np.array_equal(store.shard(0), tokens)
    (-tokens).astype(column[1:]).tofile(path)
    store, out = open_tokens(path, 100_000, column), np.empty((1, 5000), column[1:])
    with pytest.raises(UserError, match=r"contains token (-|4294)"):
        store.copy_windows(np.array([0]), 5000, out)


@pytest.mark.parametrize(
    ("dtype", "column"),
    [("int64", None), ("int64", ":uint16"), ("int64", ":uint32"), ("int64", ":int32"), ("uint32", ":uint16")],
)
def test_raw_tokens_wider_than_given_dtype_are_refused(dtype, column, tmp_path):
    """Read tokens with too narrow a dtype, which would give 0 for at least every second token."""
    path = tmp_path / "train.bin"
    for tokens in (RNG.integers(0, 50_257, 5001), RNG.integers(0, 300, 100_000)):
        tokens.astype(dtype).tofile(path)
        with pytest.raises(UserError, match=rf"train\.bin seems to hold {dtype} tokens") as refused:
            open_tokens(path, 50_304, column)
        lines = str(refused.value).splitlines()
        assert f"data.column=:{dtype}" in lines[-1]
        assert "almost 0" in lines[1]
        assert np.array_equal(open_tokens(path, 50_304, f":{dtype}").shard(0), tokens)


def test_error_for_misdetected_dtype_suggests_int64_copy(tmp_path):
    """Write uint16 tokens of which every second one is 0, so that they look like uint32."""
    path, tokens = tmp_path / "train.bin", np.stack([RNG.integers(0, 50_257, 500), np.zeros(500, int)], 1).reshape(-1)
    tokens.astype("<u2").tofile(path)
    with pytest.raises(UserError, match="seems to hold uint32") as refused:
        open_tokens(path, 50_304, ":uint16")
    assert f"np.fromfile('{path}', '<u2').astype('<i8').tofile(" in str(refused.value)
    np.fromfile(path, "<u2").astype("<i8").tofile(path)
    assert np.array_equal(open_tokens(path, 50_304, ":int64").shard(0), tokens)
    tokens[:-1].astype("<u2").tofile(path)  # an odd number of uint16 values cannot be uint32 tokens
    assert open_tokens(path, 50_304, ":uint16").total == len(tokens) - 1


def test_raw_uint16_tokens_are_read_without_dtype(tmp_path):
    """Check also few tokens, and tokens of a small vocabulary."""
    path = tmp_path / "train.bin"
    for tokens in (np.zeros(300, int), RNG.integers(0, 16, 300), RNG.integers(0, 50_257, 5000), np.array([300, 1])):
        tokens.astype("<u2").tofile(path)
        assert np.array_equal(open_tokens(path, 50_304).shard(0), tokens)


def test_an_npy_file_with_another_name_is_refused(tmp_path):
    with (tmp_path / "train.bin").open("wb") as file:
        np.save(file, TOKENS.astype("<u2"))
    for column in (None, ":uint16", ":int64"):
        with pytest.raises(UserError, match=r"is a \.npy file"):
            open_tokens(tmp_path / "train.bin", 200, column)


@pytest.mark.parametrize("write", [llm_c, llama, megatron])
def test_dtype_conflicting_with_file_header_is_refused(write, tmp_path):
    path = tmp_path / "train.bin"
    write(path)
    with pytest.raises(UserError, match="records"):
        open_tokens(path, 200, ":uint16" if write is llama else ":uint32")


def test_store_commands_refuse_external_files(tmp_path):
    path = tmp_path / "train.bin"
    nanogpt(path)
    for verb in ("show", "verify"):
        with pytest.raises(UserError):
            commands.main([verb, str(path)])
