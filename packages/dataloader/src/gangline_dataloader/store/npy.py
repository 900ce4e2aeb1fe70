"""Shards as plain .npy files, which any reader of numpy arrays can read, mapped or through GPUDirect Storage.

The header of format 1.0 is padded to 128 bytes, so that tokens are aligned to 64 bytes, and the header can be
overwritten when the length is known.
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
WHOLE = 1 << 27  # maximum bytes of a file that is verified completely; of larger files, PIECES blocks are verified
PIECES, PIECE = 16, 1 << 12  # number of sampled blocks of a file, and bytes of a block
_MAGIC = b"\x93NUMPY\x01\x00"


def make_header(dtype: str, length: int) -> bytes:
    """Make the 128-byte header of a vector of `length` numbers."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({length},), }}"
    body = text.ljust(HEADER - len(_MAGIC) - 3).encode() + b"\n"
    return _MAGIC + (len(body)).to_bytes(2, "little") + body


N = TypeVar("N", int, np.ndarray)


def compute_file_size(dtype: str | np.dtype, length: N) -> N:
    """Compute the bytes of the .npy file of a vector of `length` numbers, or of several vectors."""
    return HEADER + length * np.dtype(dtype).itemsize


def compute_checksum(path: Path) -> str:
    """Compute the XXH3-128 of a file, read in chunks."""
    with path.open("rb") as file:
        return compute_stream_checksum(file)


def compute_stream_checksum(file: BinaryIO) -> str:
    """Compute the XXH3-128 of a file that was just opened, and rewind it."""
    digest = xxhash.xxh3_128()
    while chunk := file.read(1 << 24):
        digest.update(chunk)
    file.seek(0)
    return digest.hexdigest()


def sample(file: BinaryIO, digest: Any, pieces: int) -> None:
    """Sample `pieces` evenly spaced blocks of an open file into a hash, the first and the last block included."""
    for place in np.linspace(0, max(0, os.fstat(file.fileno()).st_size - PIECE), pieces, dtype=np.int64).tolist():
        file.seek(place)
        digest.update(file.read(PIECE))


def compute_sampled_checksum(path: Path) -> str:
    """Compute the XXH3-128 of PIECES blocks of a file: detects a different file, but rarely a few changed bytes."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        sample(file, digest, PIECES)
    return digest.hexdigest()


def map_vector(
    path: Path, dtype: str, length: int, xxh3: str | None = None, pieces_xxh3: str | None = None
) -> np.ndarray:
    """Map the vector (length,) in a file into memory, read-only. Raises UserError like `map_file`, or for damage.

    xxh3         checksum of all bytes; None: not verified
    pieces_xxh3  sampled checksum, verified instead if the file has more than WHOLE bytes; None: unknown
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
                f"{path} is damaged or was replaced.",
                "The checksum of the file differs from the manifest.",
                format_verify_command(path),
            )
        return vector


def map_file(file: BinaryIO, dtype: str, length: int) -> np.ndarray:
    """Map the vector (length,) in an open file into memory, read-only; the map stays valid when the file is unlinked.

    Raises UserError if the file cannot be read, or does not have the size, dtype and length that the manifest says.
    """
    path, expected_size = Path(file.name), compute_file_size(dtype, length)
    try:
        size, start = os.fstat(file.fileno()).st_size, file.read(HEADER)
    except OSError as error:
        raise UserError(f"{path} cannot be read.", error.strerror or str(error), format_verify_command(path)) from error
    if size != expected_size:
        raise UserError(
            f"{path} has {size} bytes, and the manifest records {expected_size}.",
            "The file is truncated or was replaced.",
            format_verify_command(path),
        )
    if start != make_header(dtype, length):
        raise UserError(
            f"{path} must be an array of {length} {dtype}, as recorded in the manifest.",
            "",
            format_verify_command(path),
        )
    # A plain array, because each operation on a np.memmap goes through Python.
    return np.asarray(np.memmap(file, np.dtype(dtype), "r", HEADER, (length,))).view(np.ndarray)


def format_verify_command(path: Path) -> str:
    """Return the command that verifies the store that a file belongs to."""
    return f"gangline data verify {path.parent}"


class NpyWriter:
    """Incremental writer of one .npy vector, under a temporary name until the vector is complete.

    tag  part of the temporary name, for files that several processes may write at once
    """

    def __init__(self, path: Path, dtype: str, tag: str = "") -> None:
        self.path, self.dtype, self.length = path, dtype, 0
        self._waiting = path.with_name(f".{path.name}{tag}.part")
        self._file: BinaryIO = self._waiting.open("wb")
        self._file.write(bytes(HEADER))

    def write(self, numbers: np.ndarray) -> None:
        """Append numbers to the vector."""
        self._file.write(np.ascontiguousarray(numbers, self.dtype).data)
        self.length += len(numbers)

    def close(self) -> str:
        """Complete the file, make it durable under its name, and return its XXH3-128 checksum."""
        self._file.seek(0)
        self._file.write(make_header(self.dtype, self.length))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        digest = compute_checksum(self._waiting)
        self._waiting.replace(self.path)
        return digest


def save_array(path: Path, array: np.ndarray, tag: str = "") -> None:
    """Save an array of any shape and dtype as an .npy file, atomically."""
    with open_replacement(path, temporary=f".{path.name}{tag}.part") as file:
        np.save(file, array)
