"""What lies behind each chunk: its checksum, which zarr checks too, and its seal, which zarr does not see.

A checksum alone is as right in the chunk of another step, or of another array, as it is here. The seal is a checksum
of the save's write id, the array, the place in it, and the checksum. crc32c is one to one in each 4 bytes of what it
is of: at one place, chunks of two saves or with two checksums never have the same seal.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from fastcrc.crc32 import iscsi as crc32c

CHECKSUM = 4  # bytes
SEAL = 4
TRAILER = CHECKSUM + SEAL

MISPLACED = "it belongs to another save or another place"

_WORDS = Struct("<II")  # checksum, seal


def seal_start(write_id: str, name: str, offset: Sequence[int]) -> int:
    """What the seals of a box's chunks have in common. `write_id`: 8 hex digits."""
    return crc32c(bytes.fromhex(write_id), crc32c(f"{name} {' '.join(map(str, offset))}".encode()))


def seal(start: int, number: int, checksum: int) -> int:
    """The seal of a box's chunk `number`, from its `seal_start`."""
    return crc32c(_WORDS.pack(number, checksum), start)


def wrong(start: int | None, number: int, checksum: int, trailer: bytes | memoryview) -> str:
    """Why the chunk `number`, of which `checksum` is the crc32c, is not what was written here; "" where it is.

    `start`: None where chunks have no seal.
    """
    if int.from_bytes(trailer[:CHECKSUM], "little") != checksum:
        return "its checksum differs"
    if start is not None and int.from_bytes(trailer[CHECKSUM:], "little") != seal(start, number, checksum):
        return MISPLACED
    return ""


def trailer(start: int, number: int, checksum: int) -> bytes:
    """The 8 bytes behind a chunk."""
    return _WORDS.pack(checksum, seal(start, number, checksum))
