"""`launch=kubernetes`: writes the manifests, applies them, follows the JobSet. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from gangline import UserError
from gangline.launch import Launcher
from gangline_launch import job as jobs
from gangline_launch.follow import follow
from gangline_launch.give_back import give_back
from gangline_launch.job import SubmittedJob
from gangline_launch.kubernetes import manifests
from gangline_launch.kubernetes.scheduler import KubernetesScheduler, kubectl

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline.tools import RunDirectory
    from gangline_launch.kubernetes.config import KubernetesLaunch

FILE = "jobset.yaml"


class KubernetesLauncher(Launcher):
    """The ranks run in pods; this process only looks on."""

    def __init__(self, config: KubernetesLaunch, run: Run) -> None:
        self.config, self.run = config, run

    def launch(self, directory: RunDirectory) -> int:
        """Apply the manifests and follow to the end; Ctrl-C leaves it alone. Raises UserError where that is refused."""
        run_dir = directory.path.resolve()
        text = dump(manifests.render(self.config, self.run, run_dir))
        if self.config.dry_run:
            print(text, end="")
            return give_back(directory)
        before = jobs.read_job(run_dir)
        if before is not None and not KubernetesScheduler().state(before).over:
            raise UserError(f"{run_dir} has a job already.", f"gangline launch attach|cancel {directory.path}")
        path = jobs.folder(run_dir) / FILE
        path.write_text(text)
        kubectl("apply", "--filename", str(path))
        job = SubmittedJob.now("kubernetes", f"{self.config.namespace}/{manifests.name_of(run_dir)}")
        jobs.write_job(run_dir, job)
        directory.unlock()
        print(f"train: JobSet {job.id}: {path}", flush=True)
        return follow(run_dir, KubernetesScheduler(), shown=directory.path)


def dump(objects: list[dict[str, Any]]) -> str:
    """As one YAML text."""
    return "---\n".join(yaml.safe_dump(each, sort_keys=False, width=120) for each in objects)
