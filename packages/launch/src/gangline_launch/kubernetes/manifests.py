"""Kubernetes objects of a run as plain data: a JobSet, and a LocalQueue of Kueue if one is to be created. Torch-free.

The JobSet has one replicated job with one indexed Job, whose pods are the nodes. Kueue admits all pods or none (gang
scheduling). The Job recreates a lost pod under its index, while the agents of the other pods continue.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline_launch import fabric, setup
from gangline_launch.job import FOLDER

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_launch.kubernetes.config import KubernetesLaunch

FINAL_CODES = (2, 3)  # a user's mistake or a health verdict: do not restart
SAVED_CODES = (75,)
MARK = "gangline/submit"  # label that identifies the JobSet of one submit


def make_name(run_dir: Path, mark: str) -> str:
    """Return the JobSet's name, unique per submit: the run directory's name, a hash of its path and the submit's mark.

    It begins with a letter, as a DNS-1035 label, and has at most 40 characters: pod names append
    the replicated job's name, an index and a suffix, at most 63 characters in total.
    """
    words = re.sub(r"[^a-z0-9]+", "-", run_dir.name.lower()).strip("-")
    words = words if words[:1].isalpha() else f"run-{words}"
    digest = hashlib.sha256(f"{run_dir}\0{mark}".encode()).hexdigest()
    return f"{words[:29].strip('-')}-{digest[:10]}"


def render(config: KubernetesLaunch, run: Run, run_dir: Path, mark: str) -> list[dict[str, Any]]:
    """Return the objects to apply, in order. run_dir: path in the pods; mark: unique label of the submit."""
    objects = []
    if config.cluster_queue is not None:
        objects.append(
            {
                "apiVersion": "kueue.x-k8s.io/v1beta2",
                "kind": "LocalQueue",
                "metadata": {"name": config.queue, "namespace": config.namespace},
                "spec": {"clusterQueue": config.cluster_queue},
            }
        )
    return [*objects, build_job_set(config, run, run_dir, mark)]


def build_job_set(config: KubernetesLaunch, run: Run, run_dir: Path, mark: str) -> dict[str, Any]:
    """Return the JobSet of the run."""
    labels = {"app.kubernetes.io/managed-by": "gangline", MARK: mark}
    if config.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = config.queue
    if config.priority is not None:
        labels["kueue.x-k8s.io/priority-class"] = config.priority
    nodes = config.count_max_nodes() + config.spares
    rules = [{"name": "finalExit", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": make_name(run_dir, mark), "namespace": config.namespace, "labels": labels},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": config.job_restarts,
                "restartStrategy": "BlockingRecreate",  # pods of one start do not overlap with pods of the next
                "rules": rules,
            },
            "replicatedJobs": [
                {
                    "name": "nodes",
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "parallelism": nodes,
                            "completions": nodes,
                            "completionMode": "Indexed",
                            "backoffLimit": 4 * nodes,
                            "podFailurePolicy": {"rules": build_pod_rules()},
                            "template": build_pod(config, run, run_dir),
                        }
                    },
                }
            ],
        },
    }


def build_pod_rules() -> list[dict[str, Any]]:
    """Return the Job's failure rules: a final exit code fails the job; eviction and exit 75 do not count as failure."""
    return [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(FINAL_CODES)}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": list(SAVED_CODES)}},
    ]


def render_script(config: KubernetesLaunch, run: Run, run_dir: Path) -> str:
    """Return the bash script of a pod, which writes its output to a file in the run directory.

    The script executes the agent with `exec`, so that the agent gets the pod's SIGTERM. `tail` copies the file to
    `kubectl logs` from this pod's start, and may miss lines of the last second. JOB_COMPLETION_INDEX is set by
    Kubernetes (batch/v1, Indexed).
    """
    agent = [
        "exec python -P -m gangline_launch.agent",
        shlex.quote(str(run_dir)),
        f"--nodes {config.format_elastic_nodes()}",
        f"--per-node {config.count_ranks_of_node(run)}",
        f"--processes {config.count_ranks(run)}",
    ]
    lines = [
        f"out={shlex.quote(f'{run_dir}/{FOLDER}')}/node-$JOB_COMPLETION_INDEX.out",
        'touch "$out" || exit 1',
        'begin=$(($(wc -c < "$out") + 1))',
        'tail --pid=$$ -F -c "+$begin" "$out" 2> /dev/null &',
        'exec >> "$out" 2>&1',
        *fabric.get_setup_lines(config.fabric),
        *setup.check_exit_codes(config.setup, "python", shlex.quote(str(run_dir))),
        " ".join(agent),
    ]
    return "".join(f"{line}\n" for line in lines)


def build_pod(config: KubernetesLaunch, run: Run, run_dir: Path) -> dict[str, Any]:
    """Return the pod template of a node: one agent with all requested GPUs."""
    claim, mount = config.claim_and_mount()
    own = {"GANGLINE_KUBERNETES_NODE": "spec.nodeName", "GANGLINE_POD": "status.podIP"}
    variables = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in own.items()]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    variables.append({"name": "GANGLINE_PLACE", "valueFrom": {"fieldRef": {"fieldPath": index}}})
    variables.append({"name": "PYTHONUNBUFFERED", "value": "1"})
    container: dict[str, Any] = {
        "name": "agent",
        "image": config.image,
        # Kubernetes replaces $$ by $
        "command": ["/bin/bash", "-c", render_script(config, run, run_dir).replace("$", "$$")],
        "env": variables,
        "volumeMounts": [{"name": "runs", "mountPath": mount}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    limits = {"nvidia.com/gpu": str(gpus)} if (gpus := config.count_gpus_per_node(run)) else {}
    if limits := {**limits, **config.parse_devices()}:
        container["resources"] = {"limits": limits}
    if config.fabric in fabric.POD_DEVICES:  # network adapters register (pin) memory
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    if config.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in config.secrets]
    metadata: dict[str, Any] = {"labels": {"app.kubernetes.io/managed-by": "gangline"}}
    if config.topology is not None:
        metadata["annotations"] = {f"kueue.x-k8s.io/podset-{config.topology_mode}-topology": config.topology}
    return {
        "metadata": metadata,
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": round(config.signal_seconds or config.grace_seconds),
            "containers": [container],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        },
    }
