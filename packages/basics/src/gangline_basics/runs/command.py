"""`gangline runs`: a table of the runs in a folder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gangline.cli import make_notes, open_console
from gangline.errors import escape_controls
from gangline.record import describe_missing, to_plain
from gangline_basics.runs.listing import STATES, RunSummary, read_summaries

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
    from rich.table import Table
    from rich.text import Text

    from gangline_basics.quantities import format_quantity

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("directory", "name"):
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for column in ("step", "loss", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("last message", overflow="ellipsis", no_wrap=True)
    for run in found:
        place = Path(run.directory)
        path = place.relative_to(folder) if place != folder else place
        step = f"{run.step}" if run.steps is None else f"{run.step}/{run.steps}"
        loss = "" if run.loss is None else f"{run.loss:.4f}"
        rate = "" if run.tokens_per_second is None else format_quantity(run.tokens_per_second)
        state = Text(run.state, STYLES.get(run.state, ""))
        words = " ".join(run.words.split())
        cells = [Text(escape_controls(cell)) for cell in (str(path), run.name)]
        table.add_row(*cells, step, loss, rate, state, Text(escape_controls(words)))
    open_console().print(table)
