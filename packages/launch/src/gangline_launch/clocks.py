"""The clocks of the nodes, compared through the file system that they share. Torch-free.

A node is taken for lost by the times that nodes write down (torch's rendezvous). Clocks that differ by more than
launch.lost_seconds would end every start after a moment, with no word on why.
"""

from __future__ import annotations

import time
from pathlib import Path

from gangline import UserError
from gangline_launch import job as jobs

FOLDER = "clocks"  # in RUN_DIR/launch: a file of each node, with its time in it
RECENT_SECONDS = 600.0  # an older file says nothing of that node's clock today
TRIES = 5  # storage that is busy answers late, and so tells no time


def compare(run_dir: Path, name: str, most_seconds: float) -> None:
    """Write down the time of this node; raises UserError where another node's differs by more than `most_seconds`.

    A file's own time is of the storage's clock, or of the node's: the difference is that of two nodes, or nothing.
    """
    folder = jobs.folder(run_dir) / FOLDER
    folder.mkdir(exist_ok=True)
    own = folder / name.replace("/", "-")
    if not any(_note(own, most_seconds / 4) for _ in range(TRIES)):
        own.unlink(missing_ok=True)
        return
    ahead, now = _ahead(own), own.stat().st_mtime
    for path in sorted(folder.iterdir()):
        other = _ahead(path)
        if ahead is None or other is None or abs(path.stat().st_mtime - now) > RECENT_SECONDS:
            continue
        if abs(ahead - other) > most_seconds:
            raise UserError(
                f"the clocks of {own.name} and {path.name} differ by {abs(ahead - other):.0f} s.",
                f"By the times that they write, nodes lose each other after {most_seconds:g} s (launch.lost_seconds).",
                "Set the clocks, such as with chrony, or leave the node out:  launch.options=[--exclude=NODE]",
            )


def _note(path: Path, within: float) -> bool:
    """Write the time of this node; whether that took less than `within` seconds."""
    begun, before = time.monotonic(), time.time()
    path.write_text(f"{before}")
    return time.monotonic() - begun < within


def _ahead(path: Path) -> float | None:
    """Seconds by which a node is ahead of the storage; None of a file that is just being written."""
    try:
        return float(path.read_text()) - path.stat().st_mtime
    except (OSError, ValueError):
        return None
