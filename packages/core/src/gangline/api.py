"""Python API to train a run without Hydra; the command `train` calls the same functions.

from gangline import api
from gangline.config.defaults import build_default_run

if __name__ == "__main__":  # ranks import this file again
    directory = api.train(build_default_run(run={"steps": 100}, parallel="ddp"))
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gangline.config.check import check
from gangline.config.schema import Run
from gangline.errors import UserError
from gangline.launch.base import get_preparation
from gangline.plugin import registry
from gangline.run.directory import RunDirectory


class RunFailed(RuntimeError):
    """Error of a run that ended early, with its `exit_code`; the logs in `directory` have the reason."""

    def __init__(self, directory: RunDirectory, exit_code: int) -> None:
        self.directory, self.exit_code = directory, exit_code
        super().__init__(f"the run in {directory.path} ended with exit code {exit_code}; see {directory.logs}")


def train(run: Run) -> RunDirectory:
    """Check the run, write its directory, start its processes and wait for them; return the run directory.

    Raises UserError if the run cannot start, and RunFailed if its exit code is not 0.
    """
    directory = prepare(run, sys.argv)
    try:
        code = launch(directory)
    finally:
        directory.unlock()
    if code:
        raise RunFailed(directory, code)
    return directory


def prepare(run: Run, argv: Sequence[str] = (), job: str | None = None) -> RunDirectory:
    """Check the run, write and lock its directory, and return it; every command does so before a launch. Torch-free."""
    check(run)
    return (RunDirectory.meet if run.launch.shares else RunDirectory.create)(run, argv, job)


def launch_all(directories: Sequence[RunDirectory]) -> list[int]:
    """Launch a sweep's runs with one launcher; return their exit codes. Raises UserError if launcher options differ."""
    runs = [directory.run() for directory in directories]
    if any(run.launch != runs[0].launch for run in runs):
        raise UserError(
            "the runs of this sweep have different launch.* options.",
            "The launcher submits all runs of a sweep together, with one number of nodes and one time limit.",
            "Give all runs equal launch.* options, or start each run with its own train command.",
        )
    return registry.build(runs[0].launch, runs[0]).launch_all(directories)


def launch(directory: RunDirectory) -> int:
    """Start the processes of the run in a directory, wait for them and return the exit code.

    If the launch raises UserError before the first step, a new directory is deleted, and a resumed run's directory gets
    its former configuration back.
    """
    run = directory.run()
    if not run.launch.here and (ready := get_preparation()):
        ready.stop()
    try:
        return registry.build(run.launch, run).launch(directory)
    except UserError:
        directory.discard()
        directory.put_back()
        raise
