"""Shards as plain .npy files: anything that reads numpy arrays reads them, mapped or through GPUDirect Storage.

The header of format 1.0 is padded to 128 bytes, so tokens begin aligned to 64 bytes, and so that it can be written
first with a length that is known last.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import xxhash

from gangline import UserError
from gangline.storage.files import open_replacement

HEADER = 128
WHOLE = 1 << 27  # bytes up to which a file is read whole to be held against its checksum; above, PIECES of it
PIECES, PIECE = 16, 1 << 12
_MAGIC = b"\x93NUMPY\x01\x00"


def make_header(dtype: str, length: int) -> bytes:
    """The 128 bytes before a vector of so many numbers."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({length},), }}"
    body = text.ljust(HEADER - len(_MAGIC) - 3).encode() + b"\n"
    return _MAGIC + (len(body)).to_bytes(2, "little") + body


N = TypeVar("N", int, np.ndarray)


def compute_file_size(dtype: str | np.dtype, length: N) -> N:
    """Bytes of the file of a vector, or of several."""
    return HEADER + length * np.dtype(dtype).itemsize


def compute_checksum(path: Path) -> str:
    """XXH3-128 of a file, read piece by piece."""
    with path.open("rb") as file:
        return compute_stream_checksum(file)


def compute_stream_checksum(file: BinaryIO) -> str:
    """XXH3-128 of a file that was just opened; it is at its beginning again then."""
    digest = xxhash.xxh3_128()
    while chunk := file.read(1 << 24):
        digest.update(chunk)
    file.seek(0)
    return digest.hexdigest()


def sample(file: BinaryIO, digest: Any, pieces: int) -> None:
    """So many pieces of an open file, evenly spread, the first and the last among them, into a hash."""
    for place in np.linspace(0, max(0, os.fstat(file.fileno()).st_size - PIECE), pieces, dtype=np.int64).tolist():
        file.seek(place)
        digest.update(file.read(PIECE))


def compute_sampled_checksum(path: Path) -> str:
    """XXH3-128 of PIECES pieces of a file: it changes where a file is another, and mostly not where a few bytes are."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        sample(file, digest, PIECES)
    return digest.hexdigest()


def map_vector(
    path: Path, dtype: str, length: int, xxh3: str | None = None, pieces_xxh3: str | None = None
) -> np.ndarray:
    """The vector (length,) in a file, mapped into memory, read-only. Raises UserError as `map_file`.

    xxh3         its bytes are held against this checksum
    pieces_xxh3  or, where the file has more than WHOLE bytes, some of them against this one
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read.", error.strerror or str(error), format_verify_command(path)) from error
    with file:
        vector = map_file(file, dtype, length)
        digest, checksum = xxhash.xxh3_128(), xxh3
        if pieces_xxh3 and compute_file_size(dtype, length) > WHOLE:
            try:
                sample(file, digest, PIECES)
            except OSError as error:
                raise UserError(
                    f"{path} cannot be read.", error.strerror or str(error), format_verify_command(path)
                ) from error
            checksum = pieces_xxh3
        elif xxh3:
            digest.update(make_header(dtype, length))
            digest.update(vector.data)
        if checksum and digest.hexdigest() != checksum:
            raise UserError(
                f"{path} is not the file that the manifest says.", "Its bytes are others.", format_verify_command(path)
            )
        return vector


def map_file(file: BinaryIO, dtype: str, length: int) -> np.ndarray:
    """The vector (length,) in an open file, mapped into memory, read-only: it stays when the name goes.

    The file is held against what the manifest says of it: raises UserError where it is missing, torn, longer, or of
    another dtype or length.
    """
    path, expected_size = Path(file.name), compute_file_size(dtype, length)
    try:
        size, start = os.fstat(file.fileno()).st_size, file.read(HEADER)
    except OSError as error:
        raise UserError(f"{path} cannot be read.", error.strerror or str(error), format_verify_command(path)) from error
    if size != expected_size:
        raise UserError(
            f"{path} has {size} bytes, and the manifest says {expected_size}.",
            "It is torn or was replaced.",
            format_verify_command(path),
        )
    if start != make_header(dtype, length):
        raise UserError(
            f"{path} is not the array of {length} {dtype} that the manifest says.", "", format_verify_command(path)
        )
    # As a plain array: each operation on a np.memmap goes through Python.
    return np.asarray(np.memmap(file, np.dtype(dtype), "r", HEADER, (length,))).view(np.ndarray)


def format_verify_command(path: Path) -> str:
    """The command that looks at the whole store."""
    return f"gangline data verify {path.parent}"


class NpyWriter:
    """One .npy vector, written piece by piece under another name until it is whole.

    tag  in that other name, where several processes may write the same file at once
    """

    def __init__(self, path: Path, dtype: str, tag: str = "") -> None:
        self.path, self.dtype, self.length = path, dtype, 0
        self._waiting = path.with_name(f".{path.name}{tag}.part")
        self._file: BinaryIO = self._waiting.open("wb")
        self._file.write(bytes(HEADER))

    def write(self, numbers: np.ndarray) -> None:
        """More of them."""
        self._file.write(np.ascontiguousarray(numbers, self.dtype).data)
        self.length += len(numbers)

    def close(self) -> str:
        """Make it whole and durable under its name; gives its checksum."""
        self._file.seek(0)
        self._file.write(make_header(self.dtype, self.length))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        digest = compute_checksum(self._waiting)
        self._waiting.replace(self.path)
        return digest


def save_array(path: Path, array: np.ndarray, tag: str = "") -> None:
    """An array of any shape and dtype as an .npy file, at once or not at all."""
    with open_replacement(path, temporary=f".{path.name}{tag}.part") as file:
        np.save(file, array)
