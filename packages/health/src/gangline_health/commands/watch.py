"""Command `gangline health watch RUN_DIR`: shows the live status of a run in the terminal."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gangline.errors import escape_controls
from gangline_health.live.status import RunFollower, Status

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 64
SHOWN = 16  # maximum number of ranks in the table


def run(argv: Sequence[str]) -> int:
    """Show the status of a run until it ends or Ctrl-C. Raises UserError if the path is not a directory."""
    parser = argparse.ArgumentParser(
        prog="gangline health watch", description="Show loss, step, ranks, verdicts and the last checkpoint of a run."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("--once", action="store_true", help="print the status once and exit, for scripts")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds between two updates (default 1)")
    options = parser.parse_args(list(argv))
    follower = RunFollower(Path(options.run_dir).expanduser())
    console = Console()
    status = follower.look()
    if options.once:
        console.print(render_page(status))
        return 0
    try:
        with Live(render_page(status), console=console, auto_refresh=False) as live:
            while status.ending is None:
                time.sleep(max(0.1, options.seconds))
                status = follower.look()
                live.update(render_page(status), refresh=True)
    except KeyboardInterrupt:
        pass
    return 0


def render_page(status: Status) -> Group:
    """Return the complete status report: head, table of ranks, recent verdicts."""
    return Group(*render_head(status), *render_ranks(status), *render_verdicts(status))


def render_head(status: Status) -> Iterable[Text]:
    """Yield the lines on the run's state, newest step, losses and last checkpoint."""
    of = f" of {status.steps}" if status.steps else ""
    record = status.record or {}
    yield escape_text(f"{status.name}: {status.state}, step {record.get('step', 0)}{of}, in {status.run_dir}", "bold")
    if record:
        mfu = record.get("mfu")
        rate = f"{float(record.get('tokens_per_second', 0)):.4g} tokens/s" + (f", MFU {mfu:.1%}" if mfu else "")
        yield escape_text(
            f"loss {float(record.get('loss', math.nan)):.4f}, gradient norm {float(record.get('grad_norm', 0)):.3g}, "
            f"{rate}, {float(record.get('step_seconds', 0)):.3g} s per step, "
            f"newest step {status.quiet_seconds or 0:.0f} s ago"
        )
        yield escape_text(draw_bars(list(status.losses)))
    failure = record.get("failed_save")
    but = f"; the newest save failed: {failure}" if failure else ""
    yield escape_text(f"last checkpoint: {status.checkpoint or 'none yet'}{but}")
    if status.launches > 1:
        yield escape_text(f"started {status.launches} times; reason of the last start: {status.why}")
    if status.ending is not None:
        yield escape_text(
            f"ended: {status.ending.reason}, exit code {status.ending.exit_code}. {status.ending.evidence}"
        )


def render_ranks(status: Status) -> Iterable[Table]:
    """Yield a table of the ranks on this machine, read from their pulses; nothing without ranks."""
    if not status.ranks:
        return
    title = f"{len(status.ranks)} of {status.ranks[0].world} ranks are on this machine"
    table = Table(title=title, title_justify="left")
    for column in ("rank", "process", "step", "phase", "time in phase"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    now = time.monotonic()
    for pulse in status.ranks[:SHOWN]:
        table.add_row(
            str(pulse.rank), str(pulse.pid), str(pulse.step), pulse.phase, f"{max(0.0, now - pulse.since):.1f} s"
        )
    if len(status.ranks) > SHOWN:
        table.caption = f"and {len(status.ranks) - SHOWN} more ranks"
    yield table


def render_verdicts(status: Status) -> Iterable[Text]:
    """Yield a line for each recent verdict, the newest last."""
    for line in status.verdicts:
        at = str(line.get("time", ""))[11:19]
        evidence = str(line.get("evidence", ""))
        short = evidence if len(evidence) <= 200 else f"{evidence[:200]}..."
        yield escape_text(f"{at} {line.get('suggestion')}: {line.get('kind')} at {line.get('where')}: {short}")


def escape_text(text: str, style: str = "") -> Text:
    """Return text of a run's files with control characters and newlines escaped, safe to print on a terminal."""
    return Text(escape_controls(text.replace("\n", "\\n")), style)


def draw_bars(losses: Sequence[float]) -> str:
    """Return the newest losses as a bar chart in one line; the highest loss has the highest bar, "x" is NaN or inf."""
    newest_losses = list(losses)[-WIDTH:]
    finite = [loss for loss in newest_losses if math.isfinite(loss)]
    if not finite:
        return "x" * len(newest_losses)
    low, high = min(finite), max(finite)
    steps = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((loss - low) * steps)] if math.isfinite(loss) else "x" for loss in newest_losses)
