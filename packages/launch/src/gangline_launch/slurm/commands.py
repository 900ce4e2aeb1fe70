"""Slurm's commands (sbatch, squeue, scontrol, sinfo), run as the user. Torch-free."""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import time
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeVar

from gangline import UserError
from gangline_launch.state import SchedulerError

Answer = TypeVar("Answer")
SECONDS = 120.0  # timeout of a command; a busy controller answers late
PATIENCE = 900.0  # maximum wait for a restarting slurmctld, in seconds
ASK_AGAIN, ASK_AGAIN_MOST = 2.0, 60.0  # interval of retries in seconds: initial and maximum
STATE = re.compile(r"\s(JobState|Reason|Restarts|ExitCode|NodeList)=")  # fields of scontrol that are parsed
AWAY = re.compile(  # error messages of Slurm's commands if the controller does not answer
    r"timed out|unable to contact|connection (refused|reset)|communication connection failure|zero bytes were|"
    r"transport endpoint|controller not responding|backup controller|unexpected message received",
    re.IGNORECASE,
)


class SlurmError(SchedulerError, ABC):
    """Error of a Slurm command; the message has the reason."""


class SlurmRefused(SlurmError):
    """Error of a Slurm command that the controller refused."""


class SlurmAway(SlurmError):
    """Error of a Slurm command without an answer: the controller restarts or is busy, and may have executed it."""


def ask(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the output of a Slurm command. Raises UserError if it is not installed, SlurmError if it fails."""
    try:
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except FileNotFoundError:
        raise UserError(
            f"launch=slurm needs {command[0]}, which is not installed on this machine.",
            "Submit from a login node of the cluster, which has Slurm's commands.",
            "Log in to a login node, or train on this machine:  launch=local",
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmAway(f"{command[0]} got no answer from Slurm's controller for {SECONDS:g} s") from None
    if process.returncode:
        message = " ".join(
            _parse_errors(process.stderr) or [f"{command[0]} failed with exit code {process.returncode}"]
        )
        raise SlurmAway(message) if AWAY.search(message) else SlurmRefused(message)
    return process.stdout


def retry_while_away(question: Callable[[], Answer], seconds: float = PATIENCE) -> Answer:
    """Return the result of `question`; retry with backoff on SlurmAway. Raises SlurmAway after `seconds`."""
    deadline, wait = time.monotonic() + seconds, ASK_AGAIN
    while True:
        try:
            return question()
        except SlurmAway as error:
            if time.monotonic() + wait > deadline:
                raise
            print(f"train: {error}; retrying in {wait:g} s", flush=True)
            time.sleep(wait)
            wait = min(ASK_AGAIN_MOST, 2 * wait)


def submit(script: str, words: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> str:
    """Submit and return the new job's id. Raises UserError if Slurm refuses the job, SlurmAway without an answer."""
    try:
        return ask("sbatch", "--parsable", *words, script, environment=environment).split(";")[0].strip()
    except SlurmAway:
        raise
    except SlurmError as error:
        raise UserError(f"Slurm refused the job: {error}", *_suggest_fixes(str(error))) from error


def find_job_by_comment(comment: str) -> str | None:
    """Return the id of this user's job, even if recently ended, whose comment ends with `comment`; None without one."""
    user = getpass.getuser()
    lines = ask("squeue", "--noheader", "--states=all", f"--user={user}", "--format=%F %k").splitlines()
    return next((line.split()[0] for line in lines if line.strip().endswith(comment)), None)


def show_job(job: str) -> list[dict[str, str]]:
    """Return the fields of a job, and of each task of an array, from scontrol; [] if Slurm has forgotten it."""
    try:
        text = ask("scontrol", "--oneliner", "show", "job", job)
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return []
        raise
    return [parse_fields(line) for line in text.split("\n") if line.startswith("JobId=")]


def parse_fields(line: str) -> dict[str, str]:
    """Parse a line of `scontrol --oneliner`: "A=1 B=x y C=" -> {"A": "1", "B": "x y", "C": ""}.

    If a key occurs twice, the first value is kept: paths, which may contain any text, are last in the line.
    """
    pairs = re.findall(r"(?:^|(?<=\s))([A-Za-z][\w/:]*)=(.*?)(?=\s+[A-Za-z][\w/:]*=|\s*$)", line)
    return dict(reversed(pairs))


@cache
def find_gpus_per_node(partition: str | None) -> int | None:
    """Return the minimum number of GPUs per node of a partition (None: the default); None if Slurm does not answer."""
    options = ["--partition", partition] if partition else []
    try:
        lines = ask("sinfo", "--noheader", "--format=%P %G", *options).splitlines()
    except (SlurmError, UserError):
        return None
    names = [line.split(" ", 1) for line in lines]
    resources = [gres for name, gres in names if partition or name.endswith("*")]
    return min((parse_gpu_count(gres) for gres in resources), default=0)


def is_single_machine() -> bool:
    """Return whether every node of the cluster is this machine."""
    try:
        lines = ask("scontrol", "--oneliner", "show", "node").splitlines()
    except SlurmError:
        return False
    here = os.uname().nodename.split(".")[0]
    return bool(lines) and all(parse_fields(line).get("NodeHostName") == here for line in lines)


def parse_gpu_count(gres: str) -> int:
    """Parse a GPU count, "gpu:h100:8(S:0-1),nvme:1" -> 8; GPUs of all types count, as for --gpus-per-node."""
    words = [re.sub(r"\(.*|^gres/", "", word).split(":") for word in re.split(r",(?![^(]*\))", gres)]
    return sum(int(word[-1]) if word[-1].isdigit() else 1 for word in words if word[0] == "gpu")


def list_partitions() -> list[str]:
    """Return the names of the partitions, the default first; [] if Slurm does not answer."""
    try:
        names = ask("sinfo", "--noheader", "--format=%P").split()
    except (SlurmError, UserError):
        return []
    return [name.rstrip("*") for name in sorted(set(names), key=lambda name: (not name.endswith("*"), name))]


def _parse_errors(text: str) -> list[str]:
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line) for line in text.splitlines()]
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("unable to open")))


def _suggest_fixes(error: str) -> list[str]:
    """Return hints for the user, chosen by Slurm's error message."""
    there = f"Partitions: {', '.join(list_partitions())}." if "artition" in error and list_partitions() else ""
    hints = {
        "account": "Set an account:  launch.account=...   To list yours:  sacctmgr show associations user=$USER",
        "qos": "Set a QOS:  launch.qos=...   To list yours:  sacctmgr show associations user=$USER format=account,qos",
        "partition name": "Choose a partition:  launch.partition=...",
        "time limit": "Change the time limit:  launch.time=...",
        "node count": "Change the number of nodes:  launch.nodes=...",
        "node configuration": "No node of the partition matches: change launch.gpus_per_node or launch.constraint.",
        "temporarily unable": "The queue is full. Try again later.",
        "Resource temporarily unavailable": "The queue is full. Try again later.",
        "job submit limit": "You have reached the site's limit of queued jobs. Wait until one of your jobs ends.",
    }
    fixes = [hint for word, hint in hints.items() if word.lower() in error.lower()]
    return [*fixes[:2], there, "To pass other options of sbatch:  launch.options=['--reservation=night']"]
