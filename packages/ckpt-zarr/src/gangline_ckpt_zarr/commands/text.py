"""Output of the commands: columns, sizes, times, and a progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Row = Sequence[str]


def format_table(head: Row, rows: Sequence[Row], right: str = "") -> str:
    """Return lines of aligned columns; `right`: headings of the right-aligned columns, separated by spaces.

    Written by hand because rich takes a second for a table of 1,000 rows.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    ends = [name in right.split() for name in head]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if end else cell.ljust(width) for cell, width, end in zip(row, widths, ends, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def size(nbytes: float) -> str:
    """Return a size as text in decimal units (kB = 1,000 B), as disk vendors and file managers use them."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}" if nbytes < 100 else f"{nbytes:.0f} {unit}"


def format_age(seconds: float) -> str:
    """Return an age as text, in the largest unit (d, h, min) of which it has at least 2, else in seconds."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def format_count(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def place(url: str) -> str:
    """Return a path relative to the working directory if the path is below this directory, else unchanged."""
    here = os.getcwd().rstrip("/") + "/"
    return url.removeprefix(here)


def resolve_path(url: str) -> str:
    """Return a path with symbolic links resolved, or a URL unchanged; both without a slash at the end."""
    path = url.removeprefix("file://").removeprefix("local://")
    return path.rstrip("/") if "://" in path else os.path.realpath(os.path.expanduser(path))


def format_shape(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes)) if sizes else "scalar"


@contextmanager
def show_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances the progress bar by some bytes; without a terminal, no bar is shown."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
