"""State of a Slurm job, from scontrol. sacct is not used: many sites and all tests have no accounting."""

from __future__ import annotations

import re

from gangline_launch.job import SubmittedJob
from gangline_launch.slurm import commands
from gangline_launch.slurm.commands import SlurmError
from gangline_launch.state import ENDED, GONE, RUNS, WAITS, JobState

_WAITS = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNS = ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")

# Slurm's pending reason that waiting does not resolve -> option to change.
HOPELESS = {
    "BadConstraints": "No node matches launch.constraint, launch.gpus_per_node, launch.nodes and launch.partition.",
    "PartitionNodeLimit": "The partition allows fewer nodes: change launch.nodes, launch.spares or launch.partition.",
    "PartitionTimeLimit": "The partition allows less time per job: change launch.time or launch.partition.",
    "InvalidAccount": "Slurm does not know the account: change launch.account.",
    "InvalidQOS": "Slurm does not know the quality of service: change launch.qos.",
    "AccountNotAllowed": "The account may not use the partition: change launch.account or launch.partition.",
    "QOSNotAllowed": "The quality of service is not allowed in the partition: change launch.qos or launch.partition.",
    "AssocMaxNodePerJobLimit": "The account allows fewer nodes per job: change launch.nodes.",
    "QOSMaxNodePerJobLimit": "The quality of service allows fewer nodes per job: change launch.nodes or launch.qos.",
    "AssocMaxWallDurationPerJobLimit": "The account allows less time per job: change launch.time.",
    "QOSMaxWallDurationPerJobLimit": "The quality of service allows less time: change launch.time or launch.qos.",
}
WORDS = {
    "Resources": "waiting for free nodes",
    "Priority": "jobs with a higher priority come first",
    "Dependency": "another job must end first",
    "BeginTime": "the begin time of the job is in the future",
    "ReqNodeNotAvail": "nodes are down or reserved",
    "JobHeldAdmin": "an administrator holds the job",
}


HELD = re.compile(r"held|hold", re.IGNORECASE)  # JobHeldUser, JobHoldMaxRequeue, launch_failed_requeued_held


class SlurmScheduler:
    """Scheduler that queries `scontrol show job`."""

    def get_state(self, job: SubmittedJob) -> JobState:
        lines = commands.show_job(job.id if job.task is None else f"{job.id}_{job.task}")
        return parse_state(lines[0]) if lines else JobState(GONE, "gone")

    def cancel(self, job: SubmittedJob) -> None:
        try:
            commands.ask("scancel", job.id if job.task is None else f"{job.id}_{job.task}")
        except SlurmError:
            if not self.get_state(job).over:  # otherwise the job has ended meanwhile
                raise


def parse_state(fields: dict[str, str]) -> JobState:
    """Return the state of a job, from one line of `scontrol --oneliner show job`."""
    word, reason = fields.get("JobState", ""), fields.get("Reason", "None")
    short = reason.split(",")[0].split("(")[0].strip()
    starts, nodes = int(fields.get("Restarts", "0")), fields.get("NodeList", "").replace("(null)", "")
    if word in _WAITS:
        meaning = WORDS.get(short)
        if meaning is None and HELD.search(short):
            meaning = f"the job is held; to release the job: scontrol release {_format_job_number(fields)}"
        why = "" if short == "None" else f"{short}: {meaning}" if meaning else reason.replace("_", " ")
        return JobState(WAITS, word, why, "", starts, HOPELESS.get(short, ""))
    if word in _RUNS:
        return JobState(RUNS, word, "", nodes, starts)
    why = "" if short == "None" else reason
    code, _, signal = fields.get("ExitCode", "0:0").partition(":")
    outcome = f"exit code {code}" if code != "0" else f"signal {signal}" if signal not in ("", "0") else ""
    return JobState(ENDED, word, "; ".join(filter(None, [why, outcome])), nodes, starts)


def _format_job_number(fields: dict[str, str]) -> str:
    """Return the job's id as the user types it: JOB, or ARRAY_TASK for a task of an array."""
    array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId", "")
    return f"{array}_{task}" if array and task.isdigit() else fields.get("JobId", "JOB")
