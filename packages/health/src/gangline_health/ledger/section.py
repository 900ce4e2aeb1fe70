"""Ledger of a run for `gangline report` (capability `time_account`). Torch-free."""

from __future__ import annotations

from pathlib import Path

from gangline_basics.runs.report.time import TimeAccount, format_seconds
from gangline_health.ledger.picture import draw_ledger, format_kind
from gangline_health.ledger.report import Ledger, build_ledger

ABOUT = "Each second of the run counts to one kind of time (gangline health report)."


def compute_account(run_dir: Path) -> TimeAccount:
    """Return the time of a run by kind, with its faults; goodput is the effective training time ratio (ETTR)."""
    of = build_ledger(run_dir, lambda _: None)  # the report itself names missing records
    jumps = f" A clock was set forward, or a machine slept: {of.clock_forward:.1f} s." if of.clock_forward else ""
    return TimeAccount(
        wall_seconds=of.wall_seconds,
        seconds={format_kind(kind): seconds for kind, seconds in of.seconds.items()},
        draw=lambda width: draw_ledger(of, width, "Where the time went"),
        goodput=of.ettr,
        faults=_list_faults(of),
        about=ABOUT + jumps,
    )


def _list_faults(of: Ledger) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table of faults."""
    return [
        (
            format_seconds(fault.at),
            f"{fault.found:.2f} s",
            "never" if fault.recovery_seconds is None else f"{fault.recovery_seconds:.2f} s",
            f"{fault.kind}: {fault.named}",
        )
        for fault in of.faults
    ]
