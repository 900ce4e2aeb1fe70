"""`gangline runs`: a table of the runs in a folder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.cli import make_notes, open_console
from gangline.errors import escape_controls
from gangline.record import describe_missing, to_plain
from gangline_basics.quantities import format_quantity
from gangline_basics.runs.listing import STATES, RunSummary, read_summaries

if TYPE_CHECKING:
    from rich.console import JustifyMethod

COLUMNS = ("directory", "name", "step", "loss", "tokens/s", "state", "last message")
LEAST_WORDS = 12  # width of the last message, below which the other columns are shortened too
STYLES = {"running": "green", "failed": "red", "killed": "red", "damaged": "red", "stopped": "yellow"}


def main(argv: Sequence[str]) -> int:
    """Print the table, or one JSON object per line."""
    parser = argparse.ArgumentParser(
        prog="gangline runs",
        description="List the runs in a directory, with the state, step, loss and last message of each run.",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        default="runs",
        help="directory that contains run directories, or one run directory (default: runs)",
    )
    parser.add_argument(
        "--state", action="append", choices=STATES, default=[], help="list only runs in this state; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line for each run, for scripts")
    options = parser.parse_args(list(argv))
    runs = [run for run in read_summaries(options.folder) if not options.state or run.state in options.state]
    for run in runs:
        if run.unreadable:
            make_notes("gangline runs")(describe_missing(Path(run.directory) / "metrics.jsonl", run.unreadable))
    if options.json:
        for run in runs:
            print(json.dumps(to_plain(asdict(run)), allow_nan=False))
        return 0
    if not runs:
        print(f"No matching runs in {options.folder}.")
        return 0
    _print(runs, Path(options.folder))
    return 0


def _print(found: list[RunSummary], folder: Path) -> None:
    from rich.cells import cell_len, set_cell_size
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        align: JustifyMethod = "right" if column in ("step", "loss", "tokens/s") else "left"
        table.add_column(column, justify=align, no_wrap=True, overflow="ellipsis")
    console = open_console()
    rows = [_describe(run, folder) for run in found]
    widths = [max(map(cell_len, (name, *cells))) for name, *cells in zip(COLUMNS, *rows, strict=True)]
    # Only the message is cut: rich would shorten all columns alike.
    room = console.width - sum(widths[:-1]) - 2 * len(widths[:-1])
    for run, (*cells, words) in zip(found, rows, strict=True):
        shown = words if cell_len(words) <= room or room < LEAST_WORDS else f"{set_cell_size(words, room - 1)}…"
        table.add_row(*map(Text, cells[:-1]), Text(cells[-1], STYLES.get(run.state, "")), Text(shown))
    console.print(table)


def _describe(run: RunSummary, folder: Path) -> list[str]:
    """Return the cells of a run's row: directory, name, step, loss, tokens/s, state and last message."""
    place = Path(run.directory)
    step = f"{run.step}" if run.steps is None else f"{run.step}/{run.steps}"
    loss = "" if run.loss is None else f"{run.loss:.4f}"
    rate = "" if run.tokens_per_second is None else format_quantity(run.tokens_per_second)
    path = place.relative_to(folder) if place != folder else place
    words = escape_controls(" ".join(run.words.split()))
    return [escape_controls(str(path)), escape_controls(run.name), step, loss, rate, run.state, words]
