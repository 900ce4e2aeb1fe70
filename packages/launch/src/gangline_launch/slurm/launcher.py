"""`launch=slurm`: writes the batch script, submits it, follows the job. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gangline import UserError
from gangline.launch import Launcher
from gangline_launch import job as jobs, storage
from gangline_launch.follow import follow, follow_all
from gangline_launch.give_back import give_back, handed_over
from gangline_launch.job import SubmittedJob
from gangline_launch.slurm import commands, script
from gangline_launch.slurm.scheduler import SlurmScheduler

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline.tools import RunDirectory
    from gangline_launch.slurm.config import SlurmLaunch


class SlurmLauncher(Launcher):
    """The ranks run on the nodes that Slurm gives; this process only looks on."""

    def __init__(self, config: SlurmLaunch, run: Run) -> None:
        self.config, self.run = config, run

    def launch(self, directory: RunDirectory) -> int:
        """Submit the run and follow its job to the end; Ctrl-C leaves it alone. The exit code of the run."""
        run_dir = directory.path.resolve()
        if self.config.dry_run:
            print(script.render(self.config, self.run, run_dir), end="")
            return give_back(directory)
        refuse_second(run_dir)
        self._refuse_storage(run_dir)
        number = self._submit(run_dir, 0)
        jobs.write_job(run_dir, SubmittedJob.now("slurm", number))
        with handed_over(directory, SlurmScheduler()):
            print(f"train: job {number}: {jobs.folder(run_dir) / script.FILE}", flush=True)
            return follow(run_dir, SlurmScheduler(), shown=directory.path)

    def launch_all(self, directories: Sequence[RunDirectory]) -> list[int]:
        """One array job, each of whose tasks is a run; Ctrl-C leaves it alone. The exit code of each run."""
        paths = [directory.path.resolve() for directory in directories]
        above = Path(os.path.commonpath([path.parent for path in paths]))
        if self.config.dry_run:
            print(script.render(self.config, self.run, above, len(paths)), end="")
            return [give_back(directory) for directory in directories]
        self._refuse_storage(above)
        (jobs.folder(above) / "runs").write_text("".join(f"{path}\n" for path in paths))
        number = self._submit(above, len(paths))
        for task, (path, directory) in enumerate(zip(paths, directories, strict=True)):
            jobs.write_job(path, SubmittedJob.now("slurm", number, task))
            directory.hand_over()
        print(f"train: job {number}, {len(paths)} runs: {jobs.folder(above) / script.FILE}", flush=True)
        return follow_all(paths, SlurmScheduler())

    def _submit(self, run_dir: Path, tasks: int) -> str:
        path = jobs.folder(run_dir) / script.FILE
        path.write_text(script.render(self.config, self.run, run_dir, tasks))
        path.chmod(0o755)
        return commands.submit(str(path))

    def _refuse_storage(self, run_dir: Path) -> None:
        """Unless all nodes are this machine."""
        needed = storage.needed(self.run, run_dir, code=self.config.image is None)
        found = list(storage.unseen(needed, self.config.shared))
        if found and not commands.nodes_are_here():
            raise UserError.of(found)


def refuse_second(run_dir: Path) -> None:
    """Two jobs of one run. Raises UserError where an earlier one has not ended."""
    job = jobs.read_job(run_dir)
    if job is not None and job.scheduler == "slurm" and not (state := SlurmScheduler().state(job)).over:
        raise UserError(
            f"{run_dir} has a job already: {job.id}, {state.line()}.",
            f"To follow it:  gangline launch attach {run_dir}",
            f"To end it:  gangline launch cancel {run_dir}",
        )
