"""Ownership of a run directory: released after a dry run, held by the job from submit to end. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gangline import UserError
from gangline_launch import job as jobs
from gangline_launch.state import Scheduler, SchedulerError

if TYPE_CHECKING:
    from gangline.run.directory import RunDirectory


def give_back(directory: RunDirectory) -> int:
    """Discard a new run directory, or restore an existing one, after a dry run; return exit code 0."""
    directory.put_back()
    if not directory.discard():
        directory.unlock()
    return 0


@contextlib.contextmanager
def keep_job_on_error(directory: RunDirectory, scheduler: Scheduler) -> Iterator[None]:
    """Hand the run directory over to its job; on UserError take the directory back if the job is over.

    The directory of a run that its ranks refused is then removed, as for a run on this machine.
    """
    directory.hand_over()
    try:
        yield
    except UserError:
        with contextlib.suppress(SchedulerError):
            if scheduler.get_state(jobs.require_job(directory.path)).over:
                directory.take_back()
        raise
