"""Lock of a run directory, held by one `train` process or shared by the nodes of one job. Torch-free."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from gangline.errors import UserError
from gangline.run.files import refuse_planted
from gangline.storage.files import lock_handle, open_lock

OVER_SECONDS = 60.0  # timeout for a new node that waits for the last nodes of a job that is over
_OVER = " over"
MEETING = ".meeting"  # folder for the rendezvous of the nodes of one job


class RunLock:
    """Lock on the file `.lock` of a run directory: exclusive to one process, or shared by the nodes of a job."""

    def __init__(self, path: Path) -> None:
        self.path = path  # path of the run directory
        self._handle: int | None = None
        self._job = ""  # name of the job that shares the directory

    def take(self) -> None:
        """Lock the directory for the life of this process. Raises UserError if another process holds the lock."""
        if self._handle is not None:
            return
        try:
            refuse_planted(self.path)
            handle = open_lock(self.path / ".lock")
        except OSError as error:
            raise explain_unwritable(self.path, error) from error
        try:
            lock_handle(handle, seconds=0)
        except BlockingIOError:
            holder = os.read(handle, 100).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise _explain_in_use(self.path, holder) from None
        except OSError:
            _say_unlocked(os.fstat(handle).st_dev)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        self._handle = handle

    def share(self, waits: bool = True, entered: Callable[[bool], None] = lambda first: None) -> str:
        """Share the directory with the other nodes of one job; return the job's name.

        The first node in a free directory names the job. entered(first) is called while no other node can enter; first:
        whether this node is the first. A node does not join a job that is over; with `waits` it waits up to
        `OVER_SECONDS` for the nodes of that job to leave. Raises UserError if another process holds the directory
        exclusively, and if the file system has no locks.
        """
        deadline = time.monotonic() + OVER_SECONDS
        try:
            refuse_planted(self.path)
        except OSError as error:
            raise explain_unwritable(self.path, error) from error
        while not self._job:
            with self.enter_alone():
                handle = open_lock(self.path / ".lock")
                try:
                    lock_handle(handle, seconds=0)
                except BlockingIOError:
                    job, first = self._join(handle), False
                else:
                    job, first = uuid.uuid4().hex[:12], True
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, f"job {job}\n".encode(), 0)
                    lock_handle(handle, shared=True)
                    for old in (self.path / MEETING).glob("st*-*"):
                        old.unlink(missing_ok=True)
                if not (over := job.endswith(_OVER)) or not waits:
                    self.release()
                    self._handle, self._job = handle, job.removesuffix(_OVER)
                    entered(first)
                    break
                os.close(handle)
            if over and time.monotonic() > deadline:
                raise _explain_in_use(self.path, "the last node of a finished job")
            time.sleep(0.1)
        return self._job

    def end_job(self) -> None:
        """Mark the job as over, so that nodes that start later wait for the next job of the run."""
        if self._handle is not None and self._job:
            os.pwrite(self._handle, f"job {self._job}{_OVER}\n".encode(), 0)

    def is_held_by_others(self) -> bool:
        """Return whether other nodes of the job hold the directory. Call it only at the end: it may lose the lock."""
        try:
            if self._handle is not None and self._job:
                lock_handle(self._handle, seconds=0)
        except BlockingIOError:
            return True
        return False

    def release(self) -> None:
        """Release the directory."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle, self._job = None, ""

    @contextlib.contextmanager
    def enter_alone(self) -> Iterator[None]:
        """Keep other nodes from creating the directory or joining the job during the block. Raises UserError."""
        try:
            (self.path / MEETING).mkdir(exist_ok=True)
            handle = open_lock(self.path / MEETING / "entry")
        except OSError as error:
            raise explain_unwritable(self.path, error) from error
        try:
            lock_handle(handle)
            yield
        except FileNotFoundError as error:
            raise UserError(f"{self.path} was deleted because its run was refused.", "Repeat the command.") from error
        except OSError as error:
            raise UserError(
                f"{self.path} is on a file system without locks: {error.strerror or error}.",
                "The nodes of launch=elastic need locks in the run directory to coordinate.",
                "Choose a directory on another file system:  train run.dir=...",
            ) from error
        finally:
            os.close(handle)

    def _join(self, handle: int) -> str:
        holder = os.pread(handle, 100, 0).decode(errors="replace").strip()
        try:
            lock_handle(handle, shared=True, seconds=0)
        except BlockingIOError:
            os.close(handle)
            raise _explain_in_use(self.path, holder) from None
        return holder.removeprefix("job ")


def explain_unwritable(path: Path, error: OSError) -> UserError:
    """Return the error for a directory that cannot be created or written."""
    return UserError(
        f"cannot write the run directory {path}: {error.strerror or error}.",
        "Choose a writable directory with free disk space:  train run.dir=...",
    )


def _explain_in_use(path: Path, holder: str) -> UserError:
    return UserError(
        f"{path} is in use by another train command: {holder}.",
        "Wait for it or stop it; to start another run, choose another directory (run.dir=...).",
    )


@cache
def _say_unlocked(file_system: int) -> None:
    """Print a note, once per file system, that the file system has no locks; the run continues without a lock."""
    note = "train: note: the run directory is on a file system without locks; run only one train in the directory."
    print(note, file=sys.stderr, flush=True)
