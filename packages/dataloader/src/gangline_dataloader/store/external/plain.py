"""Raw .bin token files. nanoGPT: only uint16 tokens. llm.c: a header of 256 int32, [magic, version, tokens, 0, ...].

Forks of nanoGPT write wider tokens, also without a header: data.column=:uint32, :int32 or :int64 gives the dtype.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gangline import UserError
from gangline_dataloader.store.external.vector import PROBE, Vector, get_file_size, seem_wide

HEADER = 1024  # bytes of llm.c's header
MAGIC = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # (magic, version) of llm.c: tokens of GPT-2, of Llama 3
DTYPES = {":uint16": "<u2", ":uint32": "<u4", ":int32": "<i4", ":int64": "<i8"}  # as data.column names them
NUMPY = b"\x93NUMPY"


def open_tokens(file: Path, vocab_size: int, column: str | None) -> Vector:
    """Open the tokens of a raw .bin. Raises UserError if its size does not fit its header, or its dtype is unclear."""
    if column not in (None, *DTYPES):
        raise UserError(
            f"data.column={column}: {file} has no columns.",
            "For a .bin file, data.column is the dtype of the tokens.",
            f"Choices: {', '.join(f'data.column={one}' for one in DTYPES)}.",
        )
    size = get_file_size(file)
    with file.open("rb") as stream:
        head = np.frombuffer(stream.read(HEADER), "<i4") if size >= HEADER else np.zeros(3, "<i4")
    magic, version, tokens = head[:3].tolist()
    if magic not in {candidate for candidate, _ in MAGIC}:
        raw = _choose_dtype(file, size, vocab_size, column)
        itemsize = np.dtype(raw).itemsize
        if size % itemsize:
            raise UserError(
                f"{file} has {size} bytes, not a multiple of the size of {np.dtype(raw).name} tokens.",
                "The file may be truncated.",
            )
        return Vector(file, raw, 0, size // itemsize, vocab_size, None)
    dtype = MAGIC.get((magic, version))
    if dtype is None:
        raise UserError(f"{file} is a token file of llm.c of version {version}, which is not supported.")
    if column not in (None, next(name for name, candidate in DTYPES.items() if candidate == dtype)):
        raise UserError(f"data.column={column} contradicts the header of {file}, which records {np.dtype(dtype)}.")
    expected_size = HEADER + tokens * np.dtype(dtype).itemsize
    if size != expected_size:
        raise UserError(f"{file} has {size} bytes, and its header records {tokens} tokens in {expected_size} bytes.")
    return Vector(file, dtype, HEADER, tokens, vocab_size, None)


def _choose_dtype(file: Path, size: int, vocab_size: int, column: str | None) -> str:
    """Return the dtype of tokens without a header.

    Raises UserError if the tokens seem wider than the dtype of `column`: every second token would be read as 0.
    """
    with file.open("rb") as stream:
        content = np.frombuffer(stream.read(PROBE), np.uint8)
    if content[: len(NUMPY)].tobytes() == NUMPY:
        raise UserError(
            f"{file} is a .npy file, not a raw .bin file.",
            "The .npy header would be read as tokens.",
            "Write the tokens with `array.tofile(FILE)`.",
        )
    raw = DTYPES[column or ":uint16"]
    if seem_wide(content, 8) and np.dtype(raw).itemsize < 8 and not size % 8:
        raise _explain_wider_dtype(file, "int64", raw, column)
    if column is not None:
        if seem_wide(content, 4) and np.dtype(raw).itemsize < 4 and not size % 4:
            raise _explain_wider_dtype(file, "uint32", raw, column)
    elif seem_wide(content, 4) or vocab_size > 1 << 16:
        raise UserError(
            f"the dtype of the tokens in {file} is ambiguous: uint16 or uint32.",
            f"uint16 holds 65536 token ids, and model.vocab_size={vocab_size}."
            if vocab_size > 1 << 16
            else "Read as uint16, every second value is almost 0, as in uint32 tokens.",
            "data.column=:uint32, or :uint16, :int32 or :int64",
        )
    return raw


def _explain_wider_dtype(file: Path, seems: str, raw: str, column: str | None) -> UserError:
    dtype, times = np.dtype(raw), np.dtype(seems).itemsize // np.dtype(raw).itemsize
    clause = f"data.column={column} reads them as" if column else "without data.column they are read as"
    return UserError(
        f"{file} seems to hold {seems} tokens, but {clause} {dtype.name}.",
        f"Read as {dtype.name}, {times - 1} of {times} tokens are almost 0.",
        f"If the tokens are {dtype.name}, convert the file to int64, and read NEW.bin with data.column=:int64:",
        f"  np.fromfile('{file}', '{raw}').astype('<i8').tofile('NEW.bin')",
        f"Otherwise: data.column=:{seems}",
    )
