"""How a JobSet stands, and kubectl. Torch-free."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from gangline import UserError
from gangline_launch.job import SubmittedJob
from gangline_launch.state import ENDED, GONE, RUNS, WAITS, JobState

SECONDS = 120.0


def kubectl(*words: str, text: str | None = None) -> str:
    """What kubectl prints. Raises UserError where it is not here or refuses."""
    try:
        done = subprocess.run(["kubectl", *words], input=text, capture_output=True, text=True, timeout=SECONDS)
    except FileNotFoundError:
        raise UserError(
            "launch=kubernetes: there is no kubectl on this machine.",
            "A JobSet is submitted with it, in the context that it has.",
            "To see what would be submitted:  launch.dry_run=true",
        ) from None
    if done.returncode:
        raise UserError(f"kubectl {' '.join(words[:2])}: {done.stderr.strip()}")
    return done.stdout


class KubernetesScheduler:
    """Answers from `kubectl get jobset`; a job's id is NAMESPACE/NAME."""

    def state(self, job: SubmittedJob) -> JobState:
        namespace, _, name = job.id.partition("/")
        try:
            text = kubectl("get", "jobset", name, "--namespace", namespace, "--output", "json")
        except UserError as error:
            if "NotFound" in str(error):
                return JobState(GONE, "gone")
            raise
        return state_of(json.loads(text))

    def cancel(self, job: SubmittedJob) -> None:
        namespace, _, name = job.id.partition("/")
        kubectl("delete", "jobset", name, "--namespace", namespace, "--wait=false", "--ignore-not-found")


def state_of(job_set: dict[str, Any]) -> JobState:
    """From the object that kubectl gives."""
    status = job_set.get("status", {})
    starts = int(status.get("restarts", 0))
    for condition in status.get("conditions", []):
        if condition.get("status") == "True" and condition.get("type") in ("Completed", "Failed"):
            return JobState(ENDED, condition["type"], condition.get("message", ""), starts=starts)
    if job_set.get("spec", {}).get("suspend"):
        queue = job_set["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name", "")
        return JobState(WAITS, "suspended", f"in the queue {queue}" if queue else "", starts=starts)
    ready = sum(int(each.get("ready", 0)) for each in status.get("replicatedJobsStatus", []))
    return JobState(RUNS if ready else WAITS, "running" if ready else "pods start", starts=starts)
