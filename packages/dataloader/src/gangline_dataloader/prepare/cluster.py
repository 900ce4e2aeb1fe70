"""The stages of `prepare` as datatrove's tasks (extra `[cluster]`): here, or as job arrays under Slurm.

A stage begins when all tasks of the one before have ended: under Slurm by its dependencies between jobs. Task r of n
does the pieces r, r + n, ... of its stage; what is done already is passed over, so that a job that is requeued, or
submitted once more, goes on. All machines see the store's directory, at the same path.
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

LOGS = ".datatrove"  # below the store: what datatrove writes of its tasks


@dataclass
class StageShare:
    """A step of a datatrove pipeline: what one of its tasks does of a stage."""

    store: str
    identity: str
    stage: int

    def __call__(self, data: object, rank: int, world_size: int) -> None:
        store = Path(self.store)
        if is_made_by(store, self.identity):  # a task that is done again, after the last one
            return
        count = STAGES[self.stage].count(prepare_plan.read(store, self.identity))
        for number in range(rank, count, world_size):
            run_stage_item(store, self.identity, self.stage, number)


def run_here(plan: PreparePlan, tasks: int, workers: int) -> None:
    """Every stage by datatrove's local executor, `workers` tasks at a time. Raises what a task raises."""
    executors = _import_executors()
    for index, (stage, share) in enumerate(_make_stage_shares(plan)):
        count = tasks if STAGES[index].many else 1
        executors.LocalPipelineExecutor(
            [share],
            tasks=count,
            workers=min(workers, count),
            logging_dir=str(plan.store.absolute() / LOGS / stage),
            skip_completed=False,  # what is done is seen by its files
            start_method="spawn",
        ).run()


def submit(plan: PreparePlan, tasks: int, options: Mapping[str, str]) -> list[str]:
    """Every stage as an array of Slurm jobs, each behind the one before; gives their numbers.

    options  arguments of datatrove's SlurmPipelineExecutor; others are sbatch's
    Raises UserError where one is missing or Slurm refuses.
    """
    executor = _import_executors().SlurmPipelineExecutor
    parameters = inspect.signature(executor.__init__).parameters
    missing = [f"--slurm {name}=..." for name in ("partition", "time") if name not in options]
    if missing:
        raise UserError("--cluster slurm: the jobs need a partition and a time.", "", " ".join(missing))
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
        finally:  # also what was taken before another was refused
            if one.job_id:
                jobs.append(str(one.job_id))
            if jobs and plan.work.exists():  # else they have ended
                replace_json(plan.work / SUBMITTED, {"jobs": jobs})
    return jobs


def _explain_refusal(why: str, taken: list[str]) -> UserError:
    if not taken:
        return UserError("Slurm took no job.", why)
    return UserError(
        f"Slurm took jobs {', '.join(taken)} and not the next one.",
        why,
        f"scancel {' '.join(taken)}",
        "the same call, once they have ended, goes on with what they did",
    )


def refuse_if_submitted(work: Path) -> None:
    """Raises UserError where jobs that were submitted wait or run, and where Slurm does not say whether they do."""
    try:
        jobs = [str(job) for job in json.loads((work / SUBMITTED).read_bytes())["jobs"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return
    command = ["squeue", "-h", "-j", ",".join(jobs), "-o", "%i"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
        why = answer.stderr.strip() or f"exit code {answer.returncode}"
        answered = answer.returncode == 0 or "Invalid job id" in answer.stderr  # forgotten: ended long ago
    except OSError as error:
        answered, why = False, str(error)
    if not answered:
        raise UserError(
            f"Nobody knows whether jobs {', '.join(jobs)} of an earlier call are at work on {work.parent}.",
            f"squeue: {why}",
            " ".join(command),
            f"rm {work / SUBMITTED}, where they have ended for sure",
        )
    if active_jobs := sorted({line.partition("_")[0] for line in answer.stdout.split()} & set(jobs)):
        logs = work.parent / LOGS
        raise UserError(
            f"jobs {', '.join(active_jobs)} of an earlier call are at work on {work.parent}.",
            f"What they say: {logs}",
            f"squeue -j {','.join(active_jobs)}",
            f"scancel {' '.join(active_jobs)} ends them; the same call then goes on with what they did.",
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
        raise UserError(f"--slurm {name}={value}: expected a whole number.") from error
