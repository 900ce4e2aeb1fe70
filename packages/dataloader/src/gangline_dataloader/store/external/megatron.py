"""Megatron-LM's indexed dataset: tokens in NAME.bin, and an index in NAME.idx (little-endian, without padding):

9 bytes magic, uint64 version (1), uint8 dtype, uint64 sequences S, uint64 document boundaries D,
int32 (S,) tokens of each sequence, int64 (S,) byte offset of each sequence in the .bin, int64 (D,) first sequence of
each document, with S as last entry; int8 (S,) modes if there are several
"""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gangline import UserError
from gangline.storage.files import open_replacement
from gangline_dataloader.store.external.vector import Vector, get_file_size
from gangline_dataloader.store.stored import StoreTokens

MAGIC = b"MMIDIDX\x00\x00"
HEAD = 34
DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def open_tokens(file: Path, vocab_size: int) -> Vector:
    """Open the tokens of NAME.bin. Raises UserError with file and field if the index does not fit the file."""
    index = file.with_suffix(".idx")
    size, nbytes = get_file_size(index), get_file_size(file)
    content = np.memmap(index, np.uint8, "r") if size else np.empty(0, np.uint8)

    def explain_mismatch(why: str) -> UserError:
        return UserError(
            f"{index} is not a valid index of {file.name}.", why, "Copy both files again, or create both files again."
        )

    if size < HEAD or content[: len(MAGIC)].tobytes() != MAGIC:
        raise explain_mismatch("The file does not begin with the magic bytes of a Megatron-LM index.")
    version, sequences, boundaries = (int(content[at : at + 8].view("<u8")[0]) for at in (9, 18, 26))
    dtype = DTYPES.get(int(content[17]))
    if version != 1 or dtype is None:
        raise explain_mismatch(f"Version {version} with dtype {int(content[17])} is not supported.")
    expected_size = HEAD + 12 * sequences + 8 * boundaries
    if size not in (expected_size, expected_size + sequences):
        raise explain_mismatch(
            f"The index has {size} bytes; {sequences} sequences and {boundaries} boundaries need {expected_size}."
        )
    at = HEAD + 4 * sequences
    lengths = content[HEAD:at].view("<i4").astype(np.int64)
    pointers = content[at : at + 8 * sequences].view("<i8")
    first = content[at + 8 * sequences : expected_size].view("<i8")
    if (lengths < 0).any():
        raise explain_mismatch("A sequence has a negative number of tokens.")
    starts, itemsize = np.concatenate([[0], np.cumsum(lengths)]), np.dtype(dtype).itemsize
    if not np.array_equal(pointers, starts[:-1] * itemsize):
        raise explain_mismatch("The sequences are not stored one after another.")
    if not boundaries or first[0] != 0 or first[-1] != sequences or (np.diff(first) < 0).any():
        raise explain_mismatch(f"The boundaries of the documents do not ascend from 0 to {sequences}.")
    if nbytes != starts[-1] * itemsize:
        raise explain_mismatch(
            f"The index records {starts[-1]} tokens, {starts[-1] * itemsize} bytes; {file.name} has {nbytes} bytes."
        )
    return Vector(file, dtype, 0, int(starts[-1]), vocab_size, starts[first[1:]])


def write(out: Path, store: StoreTokens) -> None:
    """Write a store as OUT.bin and OUT.idx, each document as one sequence; the index is written last.

    Megatron-LM has no uint32: uint32 tokens are written as int32, as Megatron-LM does. Raises UserError if int32 is too
    small for the vocabulary.
    """
    dtype = {"|u1": "|u1", "<u2": "<u2", "<u4": "<i4"}[store.manifest.dtype]
    if store.vocab_size > 1 << 31:
        raise UserError(f"{store.folder} has a vocabulary of {store.vocab_size} tokens, too large for int32.")
    code = next(number for number, name in DTYPES.items() if name == dtype)
    lengths = []
    with _replace_file(out, "idx") as index, _replace_file(out, "bin") as file:  # the inner file is renamed first
        for shard in range(len(store.manifest.shards)):
            file.write(np.ascontiguousarray(store.shard(shard), dtype).data)
            lengths.append(np.diff(np.asarray(store.shard_ends(shard), np.int64), prepend=0))
        tokens = np.concatenate(lengths)
        count = len(tokens)
        pointers = (np.cumsum(tokens) - tokens) * np.dtype(dtype).itemsize
        index.write(MAGIC + struct.pack("<QBQQ", 1, code, count, count + 1))
        for array in (tokens.astype("<i4"), pointers.astype("<i8"), np.arange(count + 1, dtype="<i8")):
            index.write(array.data)


def _replace_file(out: Path, kind: str) -> AbstractContextManager[BinaryIO]:
    name = f"{out.name}.{kind}"
    return open_replacement(out.with_name(name), durable=False, temporary=f".{name}.part")
