"""Whose a directory is: given back after a dry run, a job's from the submit to its end. Torch-free."""

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
    """Nothing was submitted: a new directory goes, one that was there is as it was. 0, an exit code."""
    directory.put_back()
    if not directory.discard():
        directory.unlock()
    return 0


@contextlib.contextmanager
def keep_job_on_error(directory: RunDirectory, scheduler: Scheduler) -> Iterator[None]:
    """While its job may live no error takes the directory away; one whose job is known to be over may, as after a run
    on this machine: nothing is left of a run that its ranks refused.
    """
    directory.hand_over()
    try:
        yield
    except UserError:
        with contextlib.suppress(SchedulerError):
            if scheduler.get_state(jobs.require_job(directory.path)).over:
                directory.take_back()
        raise
