"""Checksum of a chunk (crc32c), and the trailer after each chunk: its checksum, which zarr checks too, and its seal.

A checksum alone does not show to which save and array a chunk belongs. The seal is a checksum of the save's write id,
the array's name, the chunk's position in the array, and the chunk's checksum. crc32c is one-to-one in each 4 bytes of
its input: chunks at one position that differ only in the save, or only in the checksum, never have equal seals.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from fastcrc.crc32 import iscsi

# crc32c, which zarr has as a codec. fastcrc was chosen by measurement: 28 GB/s on cached data (with AVX-512) and an
# eighth of a microsecond a call, three times the speed of the crc32c library; google-crc32c takes only read-only bytes.
# fastcrc takes memory without a copy and lets other threads run.
checksum_of = iscsi  # (content, checksum of the preceding bytes = 0) -> checksum
CODEC = {"name": "crc32c"}  # in zarr's metadata
CHECKSUM = 4  # bytes
SEAL = 4
TRAILER = CHECKSUM + SEAL

MISPLACED = "the chunk belongs to another save, array or position"

_WORDS = Struct("<II")  # checksum, seal


def compute_seal_start(write_id: str, name: str, offset: Sequence[int]) -> int:
    """Return the start value of the seals of all chunks of a box. `write_id`: 8 hex digits."""
    return checksum_of(bytes.fromhex(write_id), checksum_of(f"{name} {' '.join(map(str, offset))}".encode()))


def compute_seal(start: int, number: int, checksum: int) -> int:
    """Return the seal of chunk `number` of a box; `start`: the result of `compute_seal_start`."""
    return checksum_of(_WORDS.pack(number, checksum), start)


def find_trailer_error(start: int | None, number: int, checksum: int, trailer: bytes | memoryview) -> str:
    """Return why chunk `number` does not match its trailer, "" if it does. `checksum`: computed from its bytes.

    `start`: None if chunks have no seal.
    """
    if read_checksum(trailer) != checksum:
        return "its checksum differs"
    if start is not None and int.from_bytes(trailer[CHECKSUM:TRAILER], "little") != compute_seal(
        start, number, checksum
    ):
        return MISPLACED
    return ""


def make_trailer(start: int | None, number: int, content: bytes | memoryview) -> bytes:
    """Return the trailer of chunk `number`: its checksum and seal; if `start` is None, the checksum alone."""
    checksum = checksum_of(content)
    if start is None:
        return checksum.to_bytes(CHECKSUM, "little")
    return _WORDS.pack(checksum, compute_seal(start, number, checksum))


def read_checksum(trailer: bytes | memoryview) -> int:
    """Return the checksum in a trailer."""
    return int.from_bytes(trailer[:CHECKSUM], "little")
