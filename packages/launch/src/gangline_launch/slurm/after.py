"""Last line of the batch script: decides from ending.json and earlier starts whether to restart the job.

python -m gangline_launch.slurm.after RUN_DIR CODE
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from gangline import UserError
from gangline.run.directory import RunDirectory
from gangline.run.ending import RunEnding, decide_ending, read_ending
from gangline_basics.launch.exclusion import list_excluded
from gangline_launch import job as jobs
from gangline_launch.slurm import commands, requeues
from gangline_launch.slurm.commands import SlurmError, retry_while_away
from gangline_launch.slurm.config import SlurmLaunch
from gangline_launch.slurm.requeues import JobRequeue
from gangline_launch.slurm.script import FILE
from gangline_launch.slurm.submit import submit

WORDS = {"requeue": "requeueing the job", "submit": "submitting a new job without the bad nodes", "end": "the job ends"}


def read_own_job(environ: Mapping[str, str] = os.environ) -> str:
    """Return this job's id for scontrol. For an array's last task, SLURM_JOB_ID would mean the complete array."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"]


def decide(
    ending: RunEnding | None, code: int, step: int, before: list[JobRequeue], futile: int, new: tuple[str, ...]
) -> tuple[str, str]:
    """Return ("requeue", "submit" or "end", reason).

    before: earlier starts. futile: number of consecutive starts without a new step after which the job ends. new: nodes
    to exclude that the current job does not exclude.
    """
    ending = ending or decide_ending(0, failure="lost", exit_code=code)
    if not ending.requeue:
        return "end", ending.reason
    best, row = 0, 0
    for each in (*before, JobRequeue(0.0, "", step, code, "", "")):
        row = 0 if each.step > best or each.then == requeues.BEGIN else row + 1
        best = max(best, each.step)
    if row >= max(1, futile):
        return "end", f"{row} starts without progress past step {best} (launch.futile_requeues)"
    return ("submit" if new else "requeue"), ending.reason


def main(run_dir: str, code: str) -> int:
    """Restart the job if it may continue; return the exit code of the batch script."""
    path, job = Path(run_dir), read_own_job()
    ending = read_ending(path)
    end = ending.exit_code if ending is not None else int(code)
    try:
        lines = retry_while_away(lambda: commands.show_job(job))
        if lines and lines[0].get("JobState") == "RUNNING":  # otherwise the job was cancelled, or Slurm restarts it
            restart_job(path, job, ending, end)
    except (SlurmError, UserError, OSError) as error:
        print(f"train: job {job} is not restarted: {error}\n{jobs.format_resume_hint(path)}", flush=True)
    return end


def restart_job(path: Path, job: str, ending: RunEnding | None, code: int) -> None:
    """Restart (requeue or resubmit) or end the job, and log which. Raises SlurmError, UserError."""
    config = RunDirectory.open(path).run().launch
    if not isinstance(config, SlurmLaunch):
        raise UserError("the launcher of the run is no longer launch=slurm.")
    before = requeues.read(path)
    bad_nodes = {*list_excluded(path, config.excluded_hours), *(ending.exclude if ending else ())}
    new = tuple(sorted(bad_nodes - requeues.read_excluded_nodes(before)))
    step = requeues.read_highest_step(path)
    then, why = decide(ending, code, step, before, config.futile_requeues, new)
    print(f"train: job {job}: {why}; {WORDS[then]}", flush=True)
    if bad_nodes and config.drain:
        drain(sorted(bad_nodes), ending)
    if then == "submit":
        try:
            resubmit(path, config.make_exclude_option(bad_nodes))
        except UserError as error:
            print(f"train: {error}\n  Requeueing the job without excluding more nodes.", flush=True)
            then = "requeue"
    requeues.append(path, JobRequeue(time.time(), job, step, code, why, then, tuple(sorted(bad_nodes))))
    if then == "requeue":
        retry_while_away(lambda: commands.ask("scontrol", "requeue", job))


def resubmit(path: Path, words: list[str]) -> None:
    """Submit a new job with the batch script; for a sweep, only this task. Raises UserError, SlurmAway."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    script = next(above / "launch" / FILE for above in (path, *path.parents) if (above / "launch" / FILE).exists())
    submit(
        script,
        [path],
        [*words, *([f"--array={task}"] if task else [])],
        [int(task)] if task else (),
        patience=commands.PATIENCE,
    )


def drain(names: list[str], ending: RunEnding | None) -> None:
    """Drain the nodes in Slurm, with the ending's evidence as the reason; print a message if Slurm refuses."""
    why = (ending.evidence.splitlines() or [""])[0] if ending is not None else ""
    try:
        commands.ask("scontrol", "update", f"NodeName={','.join(names)}", "State=DRAIN", f"Reason=gangline: {why}")
    except SlurmError as error:
        print(f"train: cannot drain {', '.join(names)} in Slurm (launch.drain): {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
