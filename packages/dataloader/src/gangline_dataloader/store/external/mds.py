"""MosaicML's MDS (streaming): a folder with index.json and shards. Layout of a shard (little-endian):

uint32 number of samples n, uint32 (n + 1,) byte offset of each sample, then of the end of the file, JSON, samples. A
sample is the uint32 size of each column without a fixed size, then the columns, in the order of the index.

A column of tokens is `ndarray:DTYPE:T`, `ndarray:DTYPE`, `ndarray`, or `bytes`, whose dtype comes from
data.column=NAME:DTYPE. Each sample is a document. If the index has a hash of a shard, the hash is verified when
the shard is first read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from gangline import UserError
from gangline_dataloader.store.external.columns import choose_column
from gangline_dataloader.store.external.vector import PROBE, ExternalTokens, get_file_size, sample, seem_wide
from gangline_dataloader.store.fields import JsonFields
from gangline_dataloader.store.watch import WatchedFiles

INDEX = "index.json"
COLUMNS = ("column_names", "column_encodings", "column_sizes")
HASHES = {"md5", "sha1", "sha224", "sha256", "sha384", "sha512", "xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128"}
DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}
KEPT = 32  # maximum number of shards whose tokens are in memory; shards usually have at most 64 MiB
FIXED = {"int": 8, **{f"{kind}{bits}": bits // 8 for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)}}


@dataclass(frozen=True)
class _ShardLayout:
    """Byte offsets `at` (n,) of the tokens of a shard's n samples, and numbers of tokens `count` (n,)."""

    file: Path
    at: np.ndarray
    count: np.ndarray
    hashes: Mapping[str, str]


class MdsTokens(ExternalTokens):
    """The tokens of all MDS samples, one after another. Reading a shard joins its tokens in memory."""

    def __init__(
        self, folder: Path, layouts: list[_ShardLayout], dtype: np.dtype, vocab_size: int, watched: WatchedFiles
    ) -> None:
        self.name, self._layouts, self._dtype, self.watched = str(folder), layouts, dtype, watched
        samples = np.cumsum([0, *(len(one.count) for one in layouts)])
        self.documents_before = samples[:-1]
        self._compared: set[int] = set()  # shards whose hash was verified
        digest = blake2b((folder / INDEX).read_bytes() + str(dtype).encode(), digest_size=16)
        for one in layouts:
            sample(one.file, digest, 8)
        super().__init__(
            [int(one.count.sum()) for one in layouts],
            dtype,
            vocab_size=vocab_size,
            end_of_text=None,
            identity=digest.hexdigest(),
            documents=int(samples[-1]),
            keep=KEPT,
        )

    def open(self, shard: int) -> np.ndarray:
        layout, size = self._layouts[shard], self._dtype.itemsize
        self.watched.look_at(layout.file)
        content = np.memmap(layout.file, np.uint8, "r")
        if shard not in self._compared:
            _compare(layout.file, content, layout.hashes)
            self._compared.add(shard)
        pairs = zip(layout.at.tolist(), (layout.count * size).tolist(), strict=True)
        return np.concatenate([content[at : at + nbytes] for at, nbytes in pairs]).view(self._dtype)

    def open_ends(self, shard: int) -> np.ndarray:
        return np.cumsum(self._layouts[shard].count)


def open_tokens(folder: Path, vocab_size: int, column: str | None) -> MdsTokens:
    """Open the tokens in an MDS folder. Raises UserError with file and field if the index or a shard is damaged."""
    path = folder / INDEX
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read.", str(error)) from error
    entries = content.get("shards") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path} is not an MDS index: the list of shards is missing.")
    dtypes, layouts, watched_files = set(), [], WatchedFiles()
    for number, entry in enumerate(entries):
        dtype, layout = _read_shard_layout(folder, JsonFields(entry, f"{path}, shard {number}"), column, watched_files)
        dtypes.add(dtype)
        layouts.append(layout)
    if len(dtypes) > 1:
        raise UserError(
            f"{folder} has tokens of {' and '.join(sorted(map(str, dtypes)))}.", "All shards must have one dtype."
        )
    return MdsTokens(folder, layouts, dtypes.pop(), vocab_size, watched_files)


def _read_shard_layout(
    folder: Path, said: JsonFields, column: str | None, watched: WatchedFiles
) -> tuple[np.dtype, _ShardLayout]:
    if said.read_text("format") != "mds":
        raise said.explain_damage("format", "expected 'mds'")
    if said.content.get("compression"):
        raise said.explain_damage("compression", "compressed shards are not supported: decompress the shards first")
    names, kinds = said.read_list("column_names", str), said.read_list("column_encodings", str)
    sizes = said.content.get("column_sizes")
    if not isinstance(sizes, list) or not len(names) == len(kinds) == len(sizes) > 0:
        raise said.explain_damage("column_sizes", "expected a name, an encoding and a size for each column")
    column_name, _, dtype_name = (column or "").partition(":")
    which = names.index(choose_column(str(folder), names, column_name or None))
    about = said.enter("raw_data")
    file, count = folder / about.read_name("basename"), said.read_number("samples")
    size = get_file_size(file)
    watched.add(file, None)
    if size != about.read_number("bytes"):
        raise UserError(
            f"{file} has {size} bytes, and {folder / INDEX} records {about.read_number('bytes')}.",
            "The file is truncated or was replaced.",
        )
    content = np.memmap(file, np.uint8, "r") if size else np.empty(0, np.uint8)

    def explain_mismatch(why: str) -> UserError:
        return UserError(f"{file} does not match {folder / INDEX}.", why, "Copy the folder again.")

    head = 4 * (count + 2)
    if not count or size < head or int(content[:4].view("<u4")[0]) != count:
        raise explain_mismatch(f"The header of the shard does not record {count} samples.")
    starts = content[4:head].view("<u4").astype(np.int64)
    if starts[0] < head or starts[-1] != size or (np.diff(starts) < 0).any():
        raise explain_mismatch(f"The offsets of the samples do not ascend to the size of the file, {size} bytes.")
    own = _read_columns(content[head : starts[0]].tobytes())
    for key in COLUMNS:
        if own.get(key, said.content[key]) != said.content[key]:
            raise explain_mismatch(f"The shard records {key} {own[key]!r:.80}, the index {said.content[key]!r:.80}.")
    free = [n for n, fixed in enumerate(sizes) if fixed is None]
    if any(not isinstance(fixed, int) or not 0 <= fixed <= size for fixed in sizes if fixed is not None):
        raise said.explain_damage("column_sizes", f"expected integers up to the {size} bytes of the shard, or null")
    if (starts[:-1] + 4 * len(free) > starts[1:]).any():
        raise explain_mismatch("A sample is too short for the sizes of its columns.")
    each = np.empty((count, len(names)), np.int64)
    each[:] = [0 if fixed is None else fixed for fixed in sizes]
    if free:
        index = starts[:-1, None] + np.arange(4 * len(free))
        each[:, free] = content[index].view("<u4")
    if bad := np.flatnonzero(each.sum(1) + 4 * len(free) != np.diff(starts)).tolist():
        raise explain_mismatch(
            f"Sample {bad[0]} has {int(np.diff(starts)[bad[0]])} bytes, which differs from the sum of its columns."
        )
    at = starts[:-1] + 4 * len(free) + each[:, :which].sum(1)
    dtype, at, counts = _locate_tokens(file, content, at, each[:, which], kinds[which], dtype_name, explain_mismatch)
    hashes = about.content.get("hashes") or {}
    if not isinstance(hashes, dict):
        raise about.explain_damage("hashes", "expected an object that maps the kind of each hash to the hash")
    return dtype, _ShardLayout(file, at, counts, hashes)


def _read_columns(content: bytes) -> dict[str, Any]:
    """Read a shard's own description of its columns; {} if the description is not JSON (streaming ignores it, too)."""
    try:
        columns = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return columns if isinstance(columns, dict) else {}


def _compare(file: Path, content: np.ndarray, hashes: Mapping[str, str]) -> None:
    """Compare a shard with the hashes of the index, except unknown kinds. Raises UserError if a hash differs."""
    for kind, index_hash in hashes.items():
        new = getattr(xxhash if kind.startswith("xxh") else hashlib, kind, None) if kind in HASHES else None
        if new is not None and (shard_hash := new(content).hexdigest()) != index_hash:
            raise UserError(
                f"{file} is damaged: its {kind} is {shard_hash}, and {file.parent / INDEX} records {index_hash!s:.80}.",
                "Copy the folder again.",
            )


def _locate_tokens(
    file: Path,
    content: np.ndarray,
    at: np.ndarray,
    nbytes: np.ndarray,
    kind: str,
    given: str,
    lies: Callable[[str], UserError],
) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """Skip the array headers of MDS and return (dtype, first byte (n,), number of tokens (n,)) of the samples' tokens.

    Raises UserError if the column does not hold tokens, or a sample's size contradicts its header.
    """
    base, _, rest = kind.partition(":")
    word, _, shape = rest.partition(":")
    if base not in ("ndarray", "bytes") or (base == "bytes" and not given):
        raise UserError(
            f"{file}: a column of {kind} is not supported as token column.",
            "A token column is an ndarray of integers, or bytes with a dtype in data.column.",
            "data.column=NAME, or for bytes data.column=NAME:int64",
        )
    if base == "bytes":
        word = given
    elif not word:
        if (nbytes < 1).any():
            raise lies("A sample is too short for the dtype of its array.")
        codes = content[at]
        if (codes != codes[0]).any() or int(codes[0]) not in DTYPES:
            raise UserError(f"{file}: the arrays have several dtypes, or a dtype that is not an integer.")
        word, at, nbytes = DTYPES[int(codes[0])], at + 1, nbytes - 1
    if word not in DTYPES.values():
        raise UserError(f"{file}: {word} is not a dtype of tokens.", f"Choices: {', '.join(DTYPES.values())}.")
    if given not in ("", word):
        raise UserError(
            f"{file}: data.column has the dtype {given}, and the column has the dtype {word}.",
            "data.column needs a dtype only for a column of bytes.",
            "Remove the dtype from data.column.",
        )
    dtype, sizes = np.dtype(word).newbyteorder("<"), None
    if base == "ndarray" and not shape:
        sizes, width = _read_sizes(file, content, at, nbytes, lies)
        at, nbytes = at + 1 + width, nbytes - 1 - width
    elif shape and not (shape.isdecimal() and len(shape) < 19):
        raise UserError(f"{file}: the arrays have the shape {shape:.80}, and tokens must have one dimension.")
    elif shape:
        sizes = np.full(len(at), int(shape))
    if (nbytes <= 0).any() or (nbytes % dtype.itemsize).any():
        raise lies(f"The size of a sample is not a multiple of {word}.")
    counts = nbytes // dtype.itemsize
    if sizes is not None and len(bad := np.flatnonzero(sizes != counts)):
        raise lies(
            f"The header of sample {bad[0]} records {sizes[bad[0]]} tokens, and its bytes hold {counts[bad[0]]} tokens."
        )
    if base == "bytes":
        _refuse_if_wider(file, content, at, nbytes, dtype)
    return dtype, at, counts


def _read_sizes(
    file: Path, content: np.ndarray, at: np.ndarray, nbytes: np.ndarray, lies: Callable[[str], UserError]
) -> tuple[np.ndarray, np.ndarray]:
    """Read the array lengths in a shard: numbers of tokens (n,), and widths in bytes of these numbers (n,)."""
    about = content[np.minimum(at, len(content) - 1)].astype(np.int64)
    width = 1 << (about & 3)
    if (nbytes <= width).any():
        raise lies("A sample is too short for the size of its array.")
    if (about >> 2 != 1).any():
        raise UserError(f"{file}: the arrays must have one dimension.")
    sizes = np.zeros(len(at), np.int64)
    for byte in range(int(width.max())):
        there = byte < width
        sizes[there] |= content[at[there] + 1 + byte].astype(np.int64) << 8 * byte
    return sizes, width


def _refuse_if_wider(file: Path, content: np.ndarray, at: np.ndarray, nbytes: np.ndarray, dtype: np.dtype) -> None:
    """Raise UserError if the bytes seem to be of a wider dtype than `dtype`: many tokens would be 0."""
    some = int(np.searchsorted(np.cumsum(nbytes), PROBE)) + 1
    pairs = zip(at[:some].tolist(), nbytes[:some].tolist(), strict=True)
    probe = np.concatenate([content[start : start + min(size, PROBE)] for start, size in pairs])
    for size in (8, 4, 2):
        if size > dtype.itemsize and not (nbytes % size).any() and seem_wide(probe, size):
            wide_dtype = f"{'int' if dtype.kind == 'i' else 'uint'}{8 * size}"
            raise UserError(
                f"{file} seems to hold {wide_dtype} tokens, but data.column reads them as {dtype.name}.",
                f"Read as {dtype.name}, {size // dtype.itemsize - 1} of {size // dtype.itemsize} tokens are almost 0.",
                f"data.column=NAME:{wide_dtype}",
            )
