"""Launcher `launch=slurm`: writes the batch script, submits it, follows the job. Torch-free."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from gangline import UserError
from gangline.launch.base import Launcher
from gangline.run.ending import clear_ending, read_ending, write_ending
from gangline.storage.files import write_whole
from gangline_basics.launch.exclusion import list_excluded
from gangline_launch import clocks, job as jobs, storage
from gangline_launch.follow import EXIT_FAILURE, follow, follow_all
from gangline_launch.give_back import give_back, keep_job_on_error
from gangline_launch.slurm import commands, requeues, script
from gangline_launch.slurm.commands import SlurmAway, SlurmError
from gangline_launch.slurm.requeues import JobRequeue
from gangline_launch.slurm.scheduler import SlurmScheduler
from gangline_launch.slurm.submit import cancel_on_error, find_job, submit

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline.run.directory import RunDirectory
    from gangline_launch.slurm.config import SlurmLaunch


class SlurmLauncher(Launcher):
    """Launcher whose ranks run on nodes that Slurm allocates; this process only follows the job."""

    def __init__(self, config: SlurmLaunch, run: Run) -> None:
        self.config, self.run = config, run

    def launch(self, directory: RunDirectory) -> int:
        """Submit the run and follow its job to the end; return the run's exit code. Ctrl-C leaves the job running."""
        run_dir = directory.path.resolve()
        if self.config.dry_run:
            storage.report_unchecked([self.run])
            print(script.render(self.config, self.run, run_dir), end="")
            return give_back(directory)
        self.config.refuse_unknown_gpus(self.run)
        self._refuse_storage(run_dir, [(self.run, run_dir)])
        try:
            with jobs.lock_submit(run_dir):
                refuse_second(run_dir)
                number = self._submit(run_dir, [run_dir])
        except SlurmAway as error:
            return report_unknown_job(error, [directory])
        with keep_job_on_error(directory, SlurmScheduler()):
            print(f"train: job {number}: {jobs.make_launch_folder(run_dir) / script.FILE}", flush=True)
            return follow(run_dir, SlurmScheduler(), shown=directory.path)

    def launch_all(self, directories: Sequence[RunDirectory]) -> list[int]:
        """Submit one array job with a task per run, and follow it; return each run's exit code. Ctrl-C detaches."""
        paths = [directory.path.resolve() for directory in directories]
        runs = [directory.run() for directory in directories]
        refuse_different(self.config, runs, [str(directory.path) for directory in directories])
        above = Path(os.path.commonpath([path.parent for path in paths]))
        if self.config.dry_run:
            storage.report_unchecked(runs)
            print(script.render(self.config, self.run, above, len(paths)), end="")
            return [give_back(directory) for directory in directories]
        self.config.refuse_unknown_gpus(self.run)
        self._refuse_storage(above, zip(runs, paths, strict=True))
        try:
            with jobs.lock_submit(above):
                write_whole(jobs.make_launch_folder(above) / "runs", "".join(f"{path}\n" for path in paths))
                number = self._submit(above, paths, range(len(paths)))
        except SlurmAway as error:
            return [report_unknown_job(error, directories)] * len(paths)
        for directory in directories:
            directory.hand_over()
        print(f"train: job {number}, {len(paths)} runs: {jobs.make_launch_folder(above) / script.FILE}", flush=True)
        return follow_all(paths, SlurmScheduler())

    def _submit(self, above: Path, run_dirs: Sequence[Path], tasks: Sequence[int] = ()) -> str:
        """Render and submit the script, without excluded nodes; return the job's id. Old ending.json are removed."""
        path = jobs.make_launch_folder(above) / script.FILE
        write_whole(path, script.render(self.config, self.run, above, len(tasks)))
        path.chmod(0o755)
        out = [list_excluded(run_dir, self.config.excluded_hours) for run_dir in run_dirs]
        names = sorted({name for each in out for name in each})
        if names:
            print(
                f"train: excluding {', '.join(names)}, as a health check of the run requires (launch.excluded_hours)",
                flush=True,
            )
        endings = [(run_dir, read_ending(run_dir)) for run_dir in run_dirs]
        try:
            for run_dir in run_dirs:
                clocks.forget(run_dir)
                clear_ending(run_dir)
            number = submit(path, run_dirs, self.config.make_exclude_option(names), tasks)
        except (UserError, OSError):
            for run_dir, ending in endings:
                if ending is not None:
                    write_ending(run_dir, ending)
            raise
        with cancel_on_error(number):
            for run_dir in run_dirs:
                step = requeues.read_highest_step(run_dir)
                line = JobRequeue(time.time(), number, step, 0, "submitted", requeues.BEGIN, tuple(names))
                requeues.append(run_dir, line)
        return number

    def _refuse_storage(self, above: Path, runs: Iterable[tuple[Run, Path]]) -> None:
        """Raise UserError if a path that the nodes need is on a local disk, unless the cluster is only this machine."""
        paths = [("the run directory", str(above))]
        for run, run_dir in runs:
            paths += storage.list_needed_paths(run, run_dir, code=self.config.image is None)
        problems = list(storage.find_local_paths(dict.fromkeys(paths), self.config.shared))
        if problems and not commands.is_single_machine():
            raise UserError.of(problems)


def refuse_different(config: SlurmLaunch, runs: Sequence[Run], names: Sequence[str]) -> None:
    """Raise UserError if the runs of a sweep need different jobs; the error names the differing options."""
    first = runs[0]
    if all(
        script.build_agent_command(config, run, Path()) == script.build_agent_command(config, first, Path())
        for run in runs
    ) and (len({config.count_gpus_per_node(run) for run in runs}) == 1):
        return
    raise UserError(
        "the runs of this sweep differ in processes or GPUs, but all tasks of one Slurm array job are equal.",
        *(
            f"{name}: {config.count_ranks(run)} processes, {config.count_ranks_of_node(run)} per node "
            f"with {config.count_gpus_per_node(run)} GPUs"
            for name, run in zip(names, runs, strict=True)
        ),
        f"Differing options: {', '.join(list_differing_options(runs)) or 'the number of processes'}",
        "Set one number for all runs:  launch.processes=...   or start one sweep per number.",
    )


def list_differing_options(runs: Sequence[Run]) -> list[str]:
    """Return the options that determine the number of processes and differ between the runs."""
    options = []
    if len({type(run.parallel) for run in runs}) > 1:
        options.append("parallel")
    names = dict.fromkeys(each.name for run in runs for each in fields(run.parallel))
    if not options:
        options += [
            f"parallel.{name}" for name in names if len({repr(getattr(run.parallel, name)) for run in runs}) > 1
        ]
    return [*options, *(["run.device"] if len({run.job.device for run in runs}) > 1 else [])]


def report_unknown_job(error: SlurmAway, directories: Sequence[RunDirectory]) -> int:
    """Report that it is unknown whether the job exists, and keep the run directories; return an exit code."""
    for directory in directories:
        directory.hand_over()
    print(
        f"train: {error}; whether Slurm accepted the job is unknown.\n"
        f"  When Slurm answers, find or submit the job:  train resume={jobs.quote_path(directories[0].path)}",
        file=sys.stderr,
    )
    return EXIT_FAILURE


def refuse_second(run_dir: Path) -> None:
    """Raise UserError if the run's earlier job is not over or its state is unknown: two jobs would damage the run."""
    try:
        job = find_job(run_dir)
        state = SlurmScheduler().get_state(job) if job is not None and job.scheduler == "slurm" else None
    except SlurmError as error:
        raise UserError(
            f"{run_dir} may have a job already: {error}.",
            "Two jobs in one run directory would damage the run. Try again when Slurm answers.",
        ) from error
    if job is not None and state is not None and not state.over:
        raise UserError(
            f"{run_dir} has a job already: {job.id}, {state.describe()}.",
            f"To follow the job:  gangline launch attach {jobs.quote_path(run_dir)}",
            f"To cancel the job:  gangline launch cancel {jobs.quote_path(run_dir)}",
        )
