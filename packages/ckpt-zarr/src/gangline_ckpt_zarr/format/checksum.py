"""The checksum, here alone; and what lies behind each chunk: its checksum, which zarr checks too, and its seal.

A checksum alone is as right in the chunk of another step, or of another array, as it is here. The seal is a checksum
of the save's write id, the array, the place in it, and the checksum. crc32c is one to one in each 4 bytes of what it
is of: at one place, chunks of two saves or with two checksums never have the same seal.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from fastcrc.crc32 import iscsi

# crc32c, which zarr knows as a codec. Of the libraries fastcrc was chosen by measurement: 28 GB/s of what is in the
# cache (with AVX-512) and an eighth of a microsecond a call, three times what crc32c does; google-crc32c takes
# read-only bytes alone. It takes memory without a copy and lets other threads run.
checksum_of = iscsi  # (content, checksum of what came before = 0) -> checksum
CODEC = {"name": "crc32c"}  # in zarr's metadata
CHECKSUM = 4  # bytes
SEAL = 4
TRAILER = CHECKSUM + SEAL

MISPLACED = "it belongs to another save or another place"

_WORDS = Struct("<II")  # checksum, seal


def compute_seal_start(write_id: str, name: str, offset: Sequence[int]) -> int:
    """What the seals of a box's chunks have in common. `write_id`: 8 hex digits."""
    return checksum_of(bytes.fromhex(write_id), checksum_of(f"{name} {' '.join(map(str, offset))}".encode()))


def compute_seal(start: int, number: int, checksum: int) -> int:
    """The seal of a box's chunk `number`, from `Meta.compute_seal_start`."""
    return checksum_of(_WORDS.pack(number, checksum), start)


def find_trailer_error(start: int | None, number: int, checksum: int, trailer: bytes | memoryview) -> str:
    """Why the chunk `number`, of which `checksum` is the checksum, is not what was written here; "" where it is.

    `start`: None where chunks have no seal.
    """
    if read_checksum(trailer) != checksum:
        return "its checksum differs"
    if start is not None and int.from_bytes(trailer[CHECKSUM:TRAILER], "little") != compute_seal(
        start, number, checksum
    ):
        return MISPLACED
    return ""


def make_trailer(start: int | None, number: int, content: bytes | memoryview) -> bytes:
    """What goes behind the chunk `number`: its checksum and seal; without a `start` the checksum alone."""
    checksum = checksum_of(content)
    if start is None:
        return checksum.to_bytes(CHECKSUM, "little")
    return _WORDS.pack(checksum, compute_seal(start, number, checksum))


def read_checksum(trailer: bytes | memoryview) -> int:
    """The checksum in a trailer."""
    return int.from_bytes(trailer[:CHECKSUM], "little")
