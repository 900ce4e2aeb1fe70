"""nanoGPT's .bin: uint16 tokens and nothing else. llm.c's: 256 int32 before them, [magic, version, tokens, 0, ...].

Forks of nanoGPT with more than 65,536 tokens write uint32 into a file that looks the same: data.column=:uint32 says so.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gangline import UserError
from gangline_dataloader.store.foreign.vector import PROBE, Vector, seem_wide, size_of

HEADER = 1024  # bytes
MAGIC = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # (magic, version) of llm.c: tokens of GPT-2, of Llama 3
DTYPES = {":uint16": "<u2", ":uint32": "<u4"}  # as data.column names them
NUMPY = b"\x93NUMPY"


def opened(file: Path, vocab_size: int, column: str | None) -> Vector:
    """The tokens of a file. Raises UserError where it has another size than its header says, or no clear dtype."""
    if column not in (None, *DTYPES):
        raise UserError(f"data.column={column}: {file} has no columns.", "", f"data.column={' or '.join(DTYPES)}")
    size = size_of(file)
    with file.open("rb") as stream:
        head = np.frombuffer(stream.read(HEADER), "<i4") if size >= HEADER else np.zeros(3, "<i4")
    magic, version, tokens = head[:3].tolist()
    if magic not in {known for known, _ in MAGIC}:
        raw = _raw(file, vocab_size) if column is None else DTYPES[column]
        itemsize = np.dtype(raw).itemsize
        if size % itemsize:
            raise UserError(
                f"{file} has {size} bytes, which is no number of uint{8 * itemsize} tokens.", "It may be torn."
            )
        return Vector(file, raw, 0, size // itemsize, vocab_size, None)
    dtype = MAGIC.get((magic, version))
    if dtype is None:
        raise UserError(f"{file} is a token file of llm.c of version {version}, which is not known here.")
    if column not in (None, next(name for name, known in DTYPES.items() if known == dtype)):
        raise UserError(f"data.column={column}: the header of {file} says {np.dtype(dtype)}.")
    wanted = HEADER + tokens * np.dtype(dtype).itemsize
    if size != wanted:
        raise UserError(f"{file} has {size} bytes, and its header says {tokens} tokens, {wanted} bytes.")
    return Vector(file, dtype, HEADER, tokens, vocab_size, None)


def _raw(file: Path, vocab_size: int) -> str:
    """dtype of tokens without a header. Raises UserError where it may be uint32: read as uint16 half would be zeros."""
    with file.open("rb") as stream:
        content = stream.read(PROBE)
    if content.startswith(NUMPY):
        raise UserError(f"{file} is a .npy file.", "Its header would be read as tokens.", "Write `array.tofile(FILE)`.")
    if seem_wide(np.frombuffer(content, np.uint8), 4) or vocab_size > 1 << 16:
        raise UserError(
            f"{file} does not say whether its tokens are uint16 or uint32.",
            f"uint16 holds 65536 tokens, and model.vocab_size={vocab_size}."
            if vocab_size > 1 << 16
            else "Every second uint16 is almost 0, as in uint32 tokens.",
            "data.column=:uint32, or :uint16",
        )
    return DTYPES[":uint16"]
