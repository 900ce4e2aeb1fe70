"""Options of `launch=kubernetes`. Torch-free."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gangline import Problem
from gangline.config import NonNegativeInt
from gangline_launch.config import ClusterLaunch
from gangline_launch.fabric import POD_DEVICES

if TYPE_CHECKING:
    from gangline.config import Run

LABEL = re.compile(r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?")
RESOURCE = re.compile(rf"(?P<name>{LABEL.pattern}):(?P<count>[1-9]\d*[A-Za-z]*)")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
SUBDOMAIN = re.compile(rf"{NAME.pattern}(\.{NAME.pattern})*")


@dataclass
class KubernetesLaunch(ClusterLaunch):
    """Options of `launch=kubernetes`: a JobSet with one pod per node, optionally in a queue of Kueue."""

    namespace: str = "default"  # Kubernetes namespace of the JobSet and its queue
    queue: str | None = None  # LocalQueue of Kueue for the JobSet; null: start at once, without Kueue
    cluster_queue: str | None = None  # ClusterQueue for which to create launch.queue; null: launch.queue exists
    priority: str | None = None  # WorkloadPriorityClass of Kueue; null: the default priority
    topology: str | None = None  # node label whose value all pods should share (cloud.provider.com/topology-rack)
    # placement of all pods on nodes with one value of launch.topology; required: wait for room; preferred: if possible
    topology_mode: Literal["required", "preferred"] = "preferred"
    levels: list[str] = field(default_factory=list)  # node labels, widest first, that order ranks by network locality
    # resources that each pod requests besides GPUs, as NAME:COUNT; []: the site adds them; null: none
    resources: list[str] | None = None
    volume: str | None = None  # required PersistentVolumeClaim for the run directory, CLAIM:/mount
    secrets: list[str] = field(default_factory=list)  # Kubernetes Secrets whose keys become environment variables
    # maximum number of consecutive requeues (exit code 75) of a pod without a new step; then the JobSet fails
    futile_requeues: NonNegativeInt = 10
    job_restarts: NonNegativeInt = 3  # maximum number of restarts of the JobSet

    def count_gpus_per_node(self, run: Run) -> int:
        if run.job.device is not None and run.job.device.split(":")[0] == "cpu":
            return 0
        return 8 if self.gpus_per_node is None else self.gpus_per_node

    def check(self, run: Run) -> list[Problem]:
        """Return problems of `ClusterLaunch.check`, and of a pod's image, volume, run directory, names and devices."""
        problems = super().check(run)
        if self.image is None:
            fix = "launch.image=registry/name:tag, built with this version of gangline."
            problems.append(
                Problem("launch=kubernetes needs launch.image.", "Pods run gangline from a container image.", fix)
            )
        claim, mount = self.claim_and_mount()
        if not SUBDOMAIN.fullmatch(claim) or not mount.startswith("/") or mount == "/":
            what = "launch=kubernetes needs launch.volume=CLAIM:/mount."
            why = "All pods use the run directory on this volume, and checkpoints there outlive the pods."
            problems.append(
                Problem(what, why, "Name a PersistentVolumeClaim that many nodes may write (ReadWriteMany).")
            )
        elif run.job.dir is None or self.map_to_pod(run.job.dir) is None:
            what = f"run.dir={run.job.dir} is not on launch.volume={self.volume}."
            real = "" if run.job.dir is None else f"Resolved path: {os.path.realpath(run.job.dir)}"
            why = f"{real}; resolved mount point: {os.path.realpath(mount)}." if real else ""
            problems.append(Problem(what, why, f"run.dir={mount}/my-run, with the volume mounted on this machine too."))
        if run.job.dir is not None and not run.job.dir.isprintable():
            problems.append(
                Problem(
                    f"run.dir={run.job.dir!r} contains a control character.",
                    "",
                    "Choose a directory without control characters.",
                )
            )
        problems += self._check_names()
        problems += self._check_devices()
        if self.cluster_queue is not None and self.queue is None:
            problems.append(
                Problem(
                    "launch.cluster_queue needs launch.queue.", "", "Name the LocalQueue to create:  launch.queue=NAME"
                )
            )
        return problems

    def claim_and_mount(self) -> tuple[str, str]:
        """Return (claim, mount point) of `launch.volume`; the mount point has no `..` and no trailing slash."""
        claim, _, mount = (self.volume or "").partition(":")
        return claim, mount and os.path.normpath(mount)

    def map_to_pod(self, run_dir: str | Path) -> Path | None:
        """Return the path of the run directory in a pod; None if it is not below the mount point.

        Symbolic links are resolved on this machine, because a pod sees only the volume.
        """
        _, mount = self.claim_and_mount()
        path = os.path.relpath(os.path.realpath(run_dir), os.path.realpath(mount))
        return None if path.split("/")[0] in (".", "..") else Path(mount, path)

    def parse_devices(self) -> dict[str, str]:
        """Return the resources that a pod requests besides GPUs, name -> count."""
        read = [RESOURCE.fullmatch(word) for word in self.resources or []]
        return {each["name"]: each["count"] for each in read if each}

    def _check_names(self) -> list[Problem]:
        """Return problems of names that Kubernetes would refuse after the submit, or misread."""
        forms = {  # option -> (object, pattern, maximum length); 63 if the name is also a label value
            "namespace": ("a namespace", NAME, 63),
            "queue": ("a LocalQueue", SUBDOMAIN, 63),
            "cluster_queue": ("a ClusterQueue", SUBDOMAIN, 253),
            "priority": ("a WorkloadPriorityClass", SUBDOMAIN, 63),
            "topology": ("a label", LABEL, 317),
            "levels": ("a label", LABEL, 317),
            "secrets": ("a Secret", SUBDOMAIN, 253),
            "image": ("an image", IMAGE, 4096),
        }
        problems = []
        for option, (what, form, most) in forms.items():
            value = getattr(self, option)
            for name in value if isinstance(value, list) else [value]:
                if name is not None and (not form.fullmatch(name) or len(name) > most):
                    fix = "To list labels:  kubectl get nodes --show-labels" if form is LABEL else ""
                    problems.append(Problem(f"launch.{option}={name!r} is not a valid name of {what}.", "", fix))
        return problems

    def _check_devices(self) -> list[Problem]:
        problems = [
            Problem(
                f"launch.resources contains {word!r}, which does not have the form NAME:COUNT.",
                "",
                "For example:  'launch.resources=[vpc.amazonaws.com/efa:32,hugepages-2Mi:5120Mi,memory:900Gi]'",
            )
            for word in self.resources or []
            if not RESOURCE.fullmatch(word)
        ]
        if self.fabric in POD_DEVICES and self.resources is None:
            example, source = POD_DEVICES[self.fabric]
            problems.append(
                Problem(
                    f"launch.fabric={self.fabric} needs launch.resources: a pod has access only to the network "
                    "adapters that it requests.",
                    f"The site's device plugin defines the names of these resources ({source}).",
                    f"'launch.resources=[{example}]', with the count per node, or [] if the site adds the resources.",
                )
            )
        return problems
