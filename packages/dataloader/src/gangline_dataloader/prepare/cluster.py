"""The stages of `prepare` as datatrove tasks (extra `[cluster]`), on this machine or as Slurm job arrays.

A stage begins when all tasks of the previous stage have ended, under Slurm by job dependencies. Task r of n does
the items r, r + n, ... of its stage and skips finished items, so a job that is requeued or resubmitted continues. All
machines must see the store's directory at the same path.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline import UserError
from gangline_dataloader.prepare import prepare_plan
from gangline_dataloader.prepare.prepare_plan import SUBMITTED, PreparePlan
from gangline_dataloader.prepare.run import STAGES, is_made_by, run_stage_item
from gangline_dataloader.store.durable import replace_json

LOGS = ".datatrove"  # folder below the store with datatrove's logs


@dataclass
class StageShare:
    """A datatrove pipeline step: one task's share of the work items of a stage, by the plan `identity` of `store`."""

    store: str
    identity: str
    stage: int

    def __call__(self, data: object, rank: int, world_size: int) -> None:
        store = Path(self.store)
        if is_made_by(store, self.identity):  # a task that runs again after the store was finished
            return
        count = STAGES[self.stage].count(prepare_plan.read(store, self.identity))
        for number in range(rank, count, world_size):
            run_stage_item(store, self.identity, self.stage, number)


def run_here(plan: PreparePlan, tasks: int, workers: int) -> None:
    """Run every stage by datatrove's local executor, `workers` tasks at a time. Raises the error of a task."""
    executors = _import_executors()
    for index, (stage, share) in enumerate(_make_stage_shares(plan)):
        count = tasks if STAGES[index].many else 1
        executors.LocalPipelineExecutor(
            [share],
            tasks=count,
            workers=min(workers, count),
            logging_dir=str(plan.store.absolute() / LOGS / stage),
            skip_completed=False,  # finished items are recognised by their files
            start_method="spawn",
        ).run()


def submit(plan: PreparePlan, tasks: int, options: Mapping[str, str]) -> list[str]:
    """Submit every stage as a Slurm job array that depends on the previous one; return the job ids.

    options  arguments of datatrove's SlurmPipelineExecutor; any other name is an option of sbatch
    Raises UserError if the partition or time is missing, or Slurm refuses a job.
    """
    executor = _import_executors().SlurmPipelineExecutor
    parameters = inspect.signature(executor.__init__).parameters
    missing = [f"--slurm {name}=..." for name in ("partition", "time") if name not in options]
    if missing:
        raise UserError("--cluster slurm needs a partition and a time limit.", "", " ".join(missing))
    arguments = {
        name: _parse_value(name, value, str(parameters[name].annotation))
        for name, value in options.items()
        if name in parameters
    }
    others = {name: value for name, value in options.items() if name not in parameters}
    before, executors = None, []
    for index, (stage, share) in enumerate(_make_stage_shares(plan)):
        before = executor(
            **{
                "job_name": f"prepare-{stage}",
                "env_command": f'export PATH="{Path(sys.executable).parent}:$PATH"',
                **arguments,
                "pipeline": [share],
                "tasks": tasks if STAGES[index].many else 1,
                "logging_dir": str(plan.store.absolute() / LOGS / stage),
                "skip_completed": False,
                "depends": before,
                "sbatch_args": {"kill-on-invalid-dep": "yes", **others},
            }
        )
        executors.append(before)
    jobs: list[str] = []
    for one in executors:
        try:
            one.launch_job()
        except (OSError, subprocess.CalledProcessError) as error:
            job_ids = [*jobs, *([str(one.job_id)] if one.job_id else [])]
            raise _explain_refusal(str(error), job_ids) from error
        finally:  # records the accepted jobs, also if Slurm rejects a later job
            if one.job_id:
                jobs.append(str(one.job_id))
            if jobs and plan.work.exists():  # the last job removes the folder
                replace_json(plan.work / SUBMITTED, {"jobs": jobs})
    return jobs


def _explain_refusal(why: str, taken: list[str]) -> UserError:
    if not taken:
        return UserError("Slurm rejected the first job of the preparation.", why)
    return UserError(
        f"Slurm accepted jobs {', '.join(taken)} of the preparation and rejected the next job.",
        why,
        f"scancel {' '.join(taken)}",
        "When the accepted jobs have ended, type the same command to continue from their finished work.",
    )


def refuse_if_submitted(work: Path) -> None:
    """Raise UserError if jobs of an earlier call are pending or running, or if squeue fails."""
    try:
        jobs = [str(job) for job in json.loads((work / SUBMITTED).read_bytes())["jobs"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return
    command = ["squeue", "-h", "-j", ",".join(jobs), "-o", "%i"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
        why = answer.stderr.strip() or f"exit code {answer.returncode}"
        answered = answer.returncode == 0 or "Invalid job id" in answer.stderr  # Slurm forgets old jobs
    except OSError as error:
        answered, why = False, str(error)
    if not answered:
        raise UserError(
            f"cannot determine whether jobs {', '.join(jobs)} of an earlier call are still writing to {work.parent}.",
            f"squeue failed: {why}",
            " ".join(command),
            f"rm {work / SUBMITTED}  if all these jobs have ended",
        )
    if active_jobs := sorted({line.partition("_")[0] for line in answer.stdout.split()} & set(jobs)):
        logs = work.parent / LOGS
        raise UserError(
            f"jobs {', '.join(active_jobs)} of an earlier call are still writing to {work.parent}.",
            f"Logs of the jobs: {logs}",
            f"squeue -j {','.join(active_jobs)}",
            f"scancel {' '.join(active_jobs)}  ends the jobs; then type the same command to continue from their work.",
        )


def _make_stage_shares(plan: PreparePlan) -> list[tuple[str, StageShare]]:
    store = str(plan.store.absolute())
    return [(stage.name, StageShare(store, plan.identity, index)) for index, stage in enumerate(STAGES)]


def _import_executors() -> Any:
    try:
        import datatrove.executor
    except ImportError as error:
        raise UserError("--cluster needs datatrove.", "", "pip install 'gangline-dataloader[cluster]'") from error
    return datatrove.executor


def _parse_value(name: str, value: str, annotation: str) -> str | int | bool:
    try:
        return int(value) if annotation == "int" else value == "true" if annotation == "bool" else value
    except ValueError as error:
        raise UserError(f"--slurm {name}={value}: expected an integer.") from error
