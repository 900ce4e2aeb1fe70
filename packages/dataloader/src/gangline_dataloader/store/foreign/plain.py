"""nanoGPT's .bin: uint16 tokens and nothing else. llm.c's: 256 int32 before them, [magic, version, tokens, 0, ...]."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gangline import UserError
from gangline_dataloader.store.foreign.vector import Vector, size_of

HEADER = 1024  # bytes
MAGIC = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # (magic, version) of llm.c: tokens of GPT-2, of Llama 3


def opened(file: Path, vocab_size: int) -> Vector:
    """The tokens of a file. Raises UserError where it has another size than its header says."""
    size = size_of(file)
    with file.open("rb") as stream:
        head = np.frombuffer(stream.read(HEADER), "<i4") if size >= HEADER else np.zeros(3, "<i4")
    magic, version, tokens = head[:3].tolist()
    if magic not in {known for known, _ in MAGIC}:
        if size % 2:
            raise UserError(f"{file} has {size} bytes, which is no number of uint16 tokens.", "It may be torn.")
        return Vector(file, "<u2", 0, size // 2, vocab_size, None)
    dtype = MAGIC.get((magic, version))
    if dtype is None:
        raise UserError(f"{file} is a token file of llm.c of version {version}, which is not known here.")
    wanted = HEADER + tokens * np.dtype(dtype).itemsize
    if size != wanted:
        raise UserError(f"{file} has {size} bytes, and its header says {tokens} tokens, {wanted} bytes.")
    return Vector(file, dtype, HEADER, tokens, vocab_size, None)
