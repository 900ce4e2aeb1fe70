"""Command `gangline launch VERB RUN_DIR`: follow, cancel or inspect the job of a run. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from gangline import UserError
from gangline.cli import make_notes
from gangline.cli.verbs import run_verb
from gangline.record import read_records
from gangline.run.directory import RunDirectory
from gangline.run.ending import read_ending
from gangline_basics.flags import Flags
from gangline_launch import job as jobs
from gangline_launch.explain import explain
from gangline_launch.follow import LAST_LINES, Lines, follow
from gangline_launch.schedulers import make_scheduler
from gangline_launch.state import SchedulerError


def attach(run_dir: Path) -> int:
    """Follow the job to its end; return the exit code of the run."""
    return follow(run_dir.resolve(), make_scheduler(jobs.require_job(run_dir)), run_dir, begun=True)


def cancel(run_dir: Path) -> int:
    """Cancel the job in the scheduler, and return without waiting for its end."""
    job = jobs.require_job(run_dir)
    scheduler = make_scheduler(job)
    state = scheduler.get_state(job)
    if state.over:
        print(f"job {job.id} is over already: {state.describe()}")
        return 0
    scheduler.cancel(job)
    print(f"job {job.id} is cancelled; ranks save first where they can.\n{jobs.format_resume_hint(run_dir)}")
    return 0


def show_logs(run_dir: Path) -> int:
    """Print the last lines of each node's output, and the paths of all log files."""
    jobs.require_job(run_dir)
    lines = Lines(run_dir)
    lines.skip(LAST_LINES)
    lines.show(sys.stdout)
    for path in (*sorted((run_dir / jobs.FOLDER).glob("*.out")), *sorted((run_dir / "logs").glob("*.log"))):
        print(path)
    return 0


def show_status(run_dir: Path) -> int:
    """Print the job's state, and the run's last step, loss and ending."""
    job = jobs.require_job(run_dir)
    print(f"{job.scheduler} job {job.id}: {make_scheduler(job).get_state(job).describe()}")
    metrics = run_dir / "metrics.jsonl"
    records = read_records(metrics, make_notes("gangline launch status")) if metrics.exists() else []
    steps = RunDirectory.open(run_dir).run().steps
    if records:
        print(f"step {records[-1]['step']} of {steps}, loss {float(records[-1]['loss']):.4f}")
    else:
        print(f"no step of {steps} is done")
    if (ending := read_ending(run_dir)) is not None:
        again = "; the same command may get further" if ending.requeue else ""
        print(f"ended: {ending.reason}, exit code {ending.exit_code}{again}")
    return 0


VERBS: dict[str, tuple[Callable[[Path], int], str]] = {
    "attach": (attach, "follow the job of a run; Ctrl-C leaves it alone"),
    "cancel": (cancel, "end the job; its ranks save first where they can"),
    "explain": (explain, "the nodes that were given, axis by tier, and the settings of the network with their sources"),
    "logs": (show_logs, "what the nodes said last, and where all of it is"),
    "status": (show_status, "how the job and the run stand"),
}


def main(argv: Sequence[str]) -> int:
    """Run a subcommand of `gangline launch`; return its exit code. Raises UserError for wrong arguments or failures."""
    texts, runs = {verb: text for verb, (_, text) in VERBS.items()}, {verb: partial(_run, verb) for verb in VERBS}
    return run_verb("launch", texts, runs, argv)


def _run(verb: str, argv: Sequence[str]) -> int:
    run, text = VERBS[verb]
    flags = Flags(f"launch {verb}", text)
    flags.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    try:
        return run(flags.read(argv).run_dir)
    except SchedulerError as error:
        raise UserError(f"gangline launch {verb}: {error}.", "The job is as it was. Try again.") from error
