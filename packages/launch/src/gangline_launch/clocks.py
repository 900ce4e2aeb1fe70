"""The clocks of the nodes, compared through the file system that they share. Torch-free.

A node is taken for lost by the times that nodes write down (torch's rendezvous). Clocks that differ by more than
launch.lost_seconds would end every start after a moment, with no word on why.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from gangline import UserError
from gangline.storage.files import write_whole
from gangline_launch import job as jobs

FOLDER = "clocks"  # in RUN_DIR/launch: a file of each node, with its time in it
RECENT_SECONDS = 600.0  # an older file says nothing of that node's clock today
TRIES = 5  # storage that is busy answers late, and so tells no time
AGAIN_SECONDS = 1.0  # from one look at a clock that seems wrong to the next


def forget(run_dir: Path) -> None:
    """What an earlier job's nodes wrote is no word on the nodes of the next: before it is submitted."""
    with suppress(FileNotFoundError):
        for path in (jobs.make_launch_folder(run_dir) / FOLDER).iterdir():
            path.unlink(missing_ok=True)


def compare(run_dir: Path, name: str, most_seconds: float) -> None:
    """Write down the time of this node; raises UserError where another node's differs by more than `most_seconds`.

    A file's own time is of the storage's clock, or of the node's: the difference is that of two nodes, or nothing.
    What differs is looked at again, with this node's time written anew: storage that stalls mends itself.
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
        f"By the times that they write, nodes lose each other after {most_seconds:g} s (launch.lost_seconds).",
        "Set the clocks, such as with chrony, or leave the node out:  launch.options=[--exclude=NODE]",
    )


def _find_clock_difference(own: Path, most_seconds: float) -> tuple[str, float] | None:
    """(another node, the seconds between its clock and this one's), where these are too many."""
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
    """Replace the time of this node by the present one; whether that took less than `within` seconds."""
    start, before = time.monotonic(), time.time()
    write_whole(path, f"{before}", durable=False)  # its rename leaves the file's own time: that of the write
    return time.monotonic() - start < within


def _read(path: Path) -> tuple[float, float] | None:
    """(seconds by which a node is ahead of the storage, when it wrote that); None of a file that is gone.

    Both are of one file: the next one that takes its name has other times.
    """
    try:
        with path.open() as file:
            mtime = os.fstat(file.fileno()).st_mtime
            return float(file.read()) - mtime, mtime
    except (OSError, ValueError):
        return None
