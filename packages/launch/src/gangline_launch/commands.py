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
        print(f"job {job.id} has already ended: {state.describe()}")
        return 0
    scheduler.cancel(job)
    print(
        f"job {job.id} is cancelled; its ranks first save a checkpoint if they can.\n{jobs.format_resume_hint(run_dir)}"
    )
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
        print(f"step 0 of {steps}: the first step has not finished yet")
    if (ending := read_ending(run_dir)) is not None:
        again = "; the run may continue if it is resumed" if ending.requeue else ""
        print(f"ended: {ending.reason}, exit code {ending.exit_code}{again}")
    return 0


VERBS: dict[str, tuple[Callable[[Path], int], str]] = {
    "attach": (attach, "follow the job of a run; Ctrl-C detaches and the job continues"),
    "cancel": (cancel, "cancel the job; its ranks first save a checkpoint if they can"),
    "explain": (
        explain,
        "print the allocated nodes, the network tier of each mesh axis, and network settings with sources",
    ),
    "logs": (show_logs, "print the last lines of each node's output, and the paths of all log files"),
    "status": (show_status, "print the state of the job, and the last step, loss and ending of the run"),
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
        raise UserError(
            f"gangline launch {verb}: {error}.", "The scheduler refused the request or did not answer. Try again."
        ) from error
