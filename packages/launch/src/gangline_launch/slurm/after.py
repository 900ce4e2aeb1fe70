"""The last line of the batch script: whether the job is started again, by ending.json and by what starts came to.

python -m gangline_launch.slurm.after RUN_DIR CODE
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from gangline.tools import RunDirectory, RunEnding, attempts, read_ending, read_records
from gangline_launch import job as jobs
from gangline_launch.job import SubmittedJob
from gangline_launch.slurm import commands
from gangline_launch.slurm.commands import SlurmError

FILE = "requeues.jsonl"


@dataclass(frozen=True)
class JobRequeue:
    """A line of RUN_DIR/launch/requeues.jsonl: a start of the job ended with `step` steps done, and what came next.

    then: "requeue", "submit" (anew, without the nodes in `exclude`) or "end".
    """

    time: float
    job: str
    step: int
    code: int
    reason: str
    then: str
    exclude: tuple[str, ...] = ()


def decide(
    ending: RunEnding | None, code: int, step: int, before: list[JobRequeue], futile: int, new: tuple[str, ...]
) -> tuple[str, str]:
    """(what comes next, why). `before`: the earlier starts; futile: how many without a new step end it; new: nodes to
    leave out that the job may still get.
    """
    if ending is not None and not ending.requeue:
        return "end", ending.reason
    if ending is None and code == 0:
        return "end", "done"
    best, row = -1, 0
    for each in (*before, JobRequeue(0.0, "", step, code, "", "")):
        row = 0 if each.step > best else row + 1
        best = max(best, each.step)
    if row >= max(1, futile):
        return "end", f"{row} starts in a row did no step beyond {best}"
    why = ending.reason if ending is not None else "killed"
    return ("submit" if new else "requeue"), why


def main(run_dir: str, code: str) -> int:
    """Start the job again, or not; its exit code."""
    path, job = Path(run_dir), os.environ["SLURM_JOB_ID"]
    ending, said = read_ending(path), commands.show_job(job)
    end = ending.exit_code if ending is not None else int(code)
    if not said or said[0].get("JobState") != "RUNNING":  # it was cancelled, or Slurm starts it again by itself
        return end
    log = jobs.folder(path) / FILE
    before = [JobRequeue(**json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []
    config = RunDirectory.open(path).run().launch
    named = {name for line in attempts.read(path) for name in line.exclude} | set(ending.exclude if ending else ())
    excluded = {name for each in before if each.then == "submit" for name in each.exclude}
    new = tuple(sorted(named - excluded))
    records = read_records(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
    step = max((record["step"] for record in records), default=0)
    then, why = decide(ending, int(code), step, before, getattr(config, "futile_requeues", 0), new)
    line = JobRequeue(time.time(), job, step, int(code), why, then, tuple(sorted(named)))
    with log.open("a") as file:
        file.write(json.dumps(asdict(line)) + "\n")
    print(f"train: job {job}: {why}; {WORDS[then]}", flush=True)
    if named and getattr(config, "drain", False):
        drain(sorted(named), ending)
    if then == "submit":
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        words = [f"--exclude={','.join(sorted(named))}", *([f"--array={task}"] if task else [])]
        script = next(iter(path.glob("launch/job.sh")), path.parent / "launch" / "job.sh")
        number = commands.submit(str(script), words)
        jobs.write_job(path, SubmittedJob.now("slurm", number, int(task) if task else None))
    elif then == "requeue":
        commands.ask("scontrol", "requeue", job)
    return end


WORDS = {"requeue": "it is queued again", "submit": "it is submitted again without bad nodes", "end": "it ends here"}


def drain(names: list[str], ending: RunEnding | None) -> None:
    """Tell Slurm to give the nodes to nobody, with the evidence as the reason; who may not do so is told."""
    why = (ending.evidence.splitlines() or [""])[0] if ending is not None else ""
    try:
        commands.ask("scontrol", "update", f"NodeName={','.join(names)}", "State=DRAIN", f"Reason=gangline: {why}")
    except SlurmError as error:
        print(f"train: {', '.join(names)} could not be drained: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
