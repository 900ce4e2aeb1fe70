"""Reader of run-ID.wandb, wandb's local log of a run, to find the newest step that earlier starts logged.

The file has a header of 7 bytes, then the log format of LevelDB: blocks of 32 KiB with chunks of (checksum, length,
kind). One or several chunks form a record, which is a message of wandb's protocol. A truncated record is skipped.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from gangline.storage.files import read_regular

BLOCK, HEADER, CHUNK = 32768, 7, struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_messages(path: Path) -> Iterator[bytes]:
    """Yield the bytes of every complete record, in order."""
    content = read_regular(path, sys.maxsize)
    at, parts = HEADER, b""
    while at + CHUNK.size <= len(content):
        room = BLOCK - at % BLOCK
        if room < CHUNK.size:
            at += room
            continue
        _, length, kind = CHUNK.unpack_from(content, at)
        piece = content[at + CHUNK.size : at + CHUNK.size + length]
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(piece) < length:
            return
        at += CHUNK.size + length
        parts = piece if kind in (FULL, FIRST) else parts + piece
        if kind in (FULL, LAST):
            yield parts


def read_history(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (step, {name: value as JSON text}) of every logged step."""
    # the module is generated at run time, so type checkers cannot find it
    protocol = import_module("wandb.proto.wandb_internal_pb2")
    for message in read_messages(path):
        record = protocol.Record()
        try:
            record.ParseFromString(message)
        except Exception:  # the last record is truncated
            return
        if record.HasField("history"):
            items = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            yield record.history.step.num, items


def find_newest_step(run_dir: str | Path, name: str) -> int:
    """Return the newest step that any start of the run with id `name` logged in the run directory; 0 without steps."""
    files = Path(run_dir).glob(f"wandb/*run-*-{name}/run-{name}.wandb")
    return max((step for file in files for step, _ in read_history(file)), default=0)
