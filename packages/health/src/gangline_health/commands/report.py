"""Command `gangline health report RUN_DIR`: prints the time ledger of a run as tables or JSON, and plots it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gangline.cli import make_notes
from gangline_basics.figure import write_figure
from gangline_health.commands.watch import escape_text
from gangline_health.ledger.picture import draw_ledger, format_kind
from gangline_health.ledger.report import Ledger, build_ledger


def run(argv: Sequence[str]) -> int:
    """Print the time ledger of a run. Raises UserError if the run has no log, or if the figure cannot be written."""
    parser = argparse.ArgumentParser(
        prog="gangline health report",
        description="Print the time ledger of a run: compute, then lost time by kind, largest first.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("--json", action="store_true", help="print the ledger as JSON, for scripts")
    parser.add_argument("--svg", metavar="FILE", help="also write a timeline of the run with its faults")
    options = parser.parse_args(list(argv))
    of = build_ledger(Path(options.run_dir).expanduser(), make_notes("gangline health report"))
    if options.svg:
        write_figure(draw_ledger(of), options.svg)
    if options.json:
        print(json.dumps(of.to_dict(), indent=1))
        return 0
    show(of, Console())
    if options.svg:
        print(f"\n{options.svg} written")
    return 0


def show(of: Ledger, console: Console) -> None:
    """Print the ledger as tables: seconds by kind, faults, ETTR."""
    wall, summary = of.wall_seconds or 1.0, of.to_dict()
    account = Table(title=f"{of.run_dir}: {of.wall_seconds:.1f} s", title_justify="left")
    for column, side in (("where the time went", "left"), ("seconds", "right"), ("share", "right")):
        account.add_column(column, justify=side)  # type: ignore[arg-type]
    for kind, sum_ in sorted(of.seconds.items(), key=lambda item: (item[0] != "compute", -item[1])):
        account.add_row(format_kind(kind), f"{sum_:.2f}", f"{sum_ / wall:.1%}")
    console.print(account)
    if of.clock_forward:
        console.print(
            f"{of.clock_forward:.1f} s of this time, mostly idle: a clock was set forward, or a machine slept"
        )
    if of.faults:
        table = Table(title="faults", title_justify="left")
        for column, side in (("at", "right"), ("detected after", "right"), ("recovery", "right"), ("fault", "left")):
            table.add_column(column, justify=side)  # type: ignore[arg-type]
        for fault in of.faults:
            recovery = "never" if fault.recovery_seconds is None else f"{fault.recovery_seconds:.2f} s"
            table.add_row(
                f"{fault.at:.1f} s", f"{fault.found:.2f} s", recovery, escape_text(f"{fault.kind}: {fault.named}")
            )
        console.print(table)
        recovered = summary["recovery_seconds"]
        recovery = f"; mean recovery {recovered['mean']:.2f} s, worst {recovered['worst']:.2f} s" if recovered else ""
        console.print(f"{len(of.faults)} faults, one every {of.mtbf_seconds:.1f} s{recovery}")
    best = summary["young_daly"]
    beside = (
        f"; {best['ettr']:.1%} expected with a save every {best['checkpoint_seconds']:.1f} s (Young/Daly)"
        if best
        else ""
    )
    console.print(f"ETTR {of.ettr:.1%}{beside}")
