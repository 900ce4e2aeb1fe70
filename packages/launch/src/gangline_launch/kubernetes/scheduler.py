"""State of a JobSet, read through kubectl. Torch-free."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from gangline import UserError
from gangline_launch.job import SubmittedJob
from gangline_launch.kubernetes.manifests import MARK
from gangline_launch.state import ENDED, GONE, RUNS, WAITS, JobState, SchedulerError

SECONDS = 120.0


class KubectlError(SchedulerError):
    """Error of a kubectl command that failed or got no answer. The cluster may have executed the command anyway."""


def run_kubectl(*words: str) -> str:
    """Return the output of kubectl. Raises UserError if it is not installed, KubectlError if it fails or times out."""
    what = f"kubectl {' '.join(words[:2])}"
    try:
        process = subprocess.run(["kubectl", *words], capture_output=True, text=True, timeout=SECONDS)
    except FileNotFoundError:
        raise UserError(
            "launch=kubernetes needs kubectl, which is not installed on this machine.",
            "kubectl submits the JobSet to the cluster of its current context.",
            "To print the manifests without submitting:  launch.dry_run=true",
        ) from None
    except subprocess.TimeoutExpired:
        raise KubectlError(f"{what} got no answer for {SECONDS:g} s") from None
    if process.returncode:
        raise KubectlError(f"{what} failed: {' '.join(process.stderr.split()) or f'exit code {process.returncode}'}")
    return process.stdout


class KubernetesScheduler:
    """Scheduler that runs `kubectl get jobset`. Job ids are NAMESPACE/NAME; a JobSet has the job's mark as label."""

    def get_state(self, job: SubmittedJob) -> JobState:
        namespace, _, name = job.id.partition("/")
        text = run_kubectl("get", "jobset", name, "--namespace", namespace, "--ignore-not-found", "--output", "json")
        job_set = read(text)
        if job_set is None or job_set["metadata"].get("labels", {}).get(MARK, "") != job.mark:
            return JobState(GONE, "gone")
        return parse_state(job_set)

    def cancel(self, job: SubmittedJob) -> None:
        """Delete the JobSet that has the job's mark. Raises KubectlError if the job has no mark."""
        namespace, _, _ = job.id.partition("/")
        if not job.mark:
            raise KubectlError(
                f"the submit label of job {job.id} is missing in job.json, so its JobSet cannot be identified"
            )
        run_kubectl("delete", "jobset", "--namespace", namespace, "--selector", f"{MARK}={job.mark}", "--wait=false")


def read(text: str) -> dict[str, Any] | None:
    """Return the object that `--output json` printed, None for no output. Raises KubectlError for anything else."""
    if not text.strip():
        return None
    try:
        job_set = json.loads(text)
    except ValueError:
        job_set = None
    if not isinstance(job_set, dict) or "metadata" not in job_set:
        raise KubectlError(f"kubectl get jobset printed {text[:80]!r}, which is not a JobSet")
    return job_set


def parse_state(job_set: dict[str, Any]) -> JobState:
    """Return the state of a job, from the JSON of its JobSet."""
    status = job_set.get("status", {})
    starts = int(status.get("restarts", 0))
    for condition in status.get("conditions", []):
        if condition.get("status") == "True" and condition.get("type") in ("Completed", "Failed"):
            return JobState(ENDED, condition["type"], condition.get("message", ""), starts=starts)
    if job_set.get("spec", {}).get("suspend"):
        queue = job_set["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name", "")
        return JobState(WAITS, "suspended", f"in queue {queue}" if queue else "", starts=starts)
    counts = status.get("replicatedJobsStatus", [])
    ready, active = (sum(int(each.get(name, 0)) for each in counts) for name in ("ready", "active"))
    if ready or not active:
        return JobState(RUNS if ready else WAITS, "running" if ready else "pods starting", starts=starts)
    # A job is ready when all its pods are ready. The run trains earlier, while a spare or a lost pod is missing.
    return JobState(RUNS, "active", "some pods are not ready", starts=starts)
