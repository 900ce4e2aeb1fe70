"""Comparison of the nodes' clocks through their shared file system, before ranks start. Torch-free.

torch's rendezvous compares the heartbeat times that nodes write. If clocks differ by more than launch.lost_seconds,
the rendezvous treats nodes as lost and soon ends every start, without a reason in the log.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from gangline import UserError
from gangline.storage.files import write_whole
from gangline_launch import job as jobs

FOLDER = "clocks"  # in RUN_DIR/launch: one file per node, which holds that node's time
RECENT_SECONDS = 600.0  # age from which a file is ignored: that node's clock may have been set since
TRIES = 5  # maximum number of measurements; a slow write to busy storage does not measure the clock
AGAIN_SECONDS = 1.0  # interval of comparisons while the clocks seem to differ


def forget(run_dir: Path) -> None:
    """Remove the times that the nodes of earlier jobs wrote. Call it before the next job is submitted."""
    with suppress(FileNotFoundError):
        for path in (jobs.make_launch_folder(run_dir) / FOLDER).iterdir():
            path.unlink(missing_ok=True)


def compare(run_dir: Path, name: str, most_seconds: float) -> None:
    """Write this node's time; raise UserError if another node's clock differs by more than `most_seconds`.

    A file's modification time (mtime) is set by the storage's clock or by the node's clock. A node's offset is the time
    that it wrote minus the mtime. With the storage's clock, the difference of two offsets is the difference of the
    nodes' clocks; with the nodes' clocks it is always 0. A difference is measured up to TRIES times, because storage
    that stalls recovers.
    """
    folder = jobs.make_launch_folder(run_dir) / FOLDER
    folder.mkdir(exist_ok=True)
    own = folder / name.replace("/", "-")
    difference = None
    for look in range(TRIES):
        if look:
            time.sleep(AGAIN_SECONDS)
        difference = _find_clock_difference(own, most_seconds)
        if difference is None:
            return
    assert difference is not None
    other, seconds = difference
    raise UserError(
        f"the clocks of {own.name} and {other} differ by {seconds:.0f} s.",
        f"Nodes compare heartbeat times, and treat a node as lost after {most_seconds:g} s (launch.lost_seconds).",
        "Synchronize the clocks, for example with chrony, or exclude the node:  launch.options=[--exclude=NODE]",
    )


def _find_clock_difference(own: Path, most_seconds: float) -> tuple[str, float] | None:
    """Return (name of another node, clock difference in seconds) if over `most_seconds`, else None."""
    if not any(_note(own, most_seconds / 4) for _ in range(TRIES)):
        own.unlink(missing_ok=True)
        return None
    if (own_reading := _read(own)) is None:
        return None
    ahead, now = own_reading
    for path in sorted(each for each in own.parent.iterdir() if not each.name.startswith(".")):
        other = _read(path)
        if other is None or abs(other[1] - now) > RECENT_SECONDS:
            continue
        if abs(ahead - other[0]) > most_seconds:
            return path.name, abs(ahead - other[0])
    return None


def _note(path: Path, within: float) -> bool:
    """Write the current time to this node's file; return whether the write took less than `within` seconds."""
    start, before = time.monotonic(), time.time()
    write_whole(path, f"{before}", durable=False)  # the rename keeps the modification time of the write
    return time.monotonic() - start < within


def _read(path: Path) -> tuple[float, float] | None:
    """Return (time in a node's file minus the file's mtime, mtime), in seconds.

    Returns None if the file is missing or not a number. Content and mtime are read from one open file, since the file
    may be replaced in between.
    """
    try:
        with path.open() as file:
            mtime = os.fstat(file.fileno()).st_mtime
            return float(file.read()) - mtime, mtime
    except (OSError, ValueError):
        return None
