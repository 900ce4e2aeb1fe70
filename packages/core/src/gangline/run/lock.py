"""Who holds a run directory: one `train` by itself, or the nodes of one job together. Torch-free."""

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

OVER_SECONDS = 60.0  # how long a node that comes to a job that is over waits for its last nodes to go
_OVER = " over"
MEETING = ".meeting"  # a folder in which nodes of one job meet


class RunLock:
    """The file `.lock` of a run directory, locked exclusively by one process, or shared by those of a job."""

    def __init__(self, path: Path) -> None:
        self.path = path  # of the directory
        self._handle: int | None = None
        self._job = ""  # of those that `share` it

    def take(self) -> None:
        """Hold the directory for as long as this process lives. Raises UserError where another process holds it."""
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
        """Hold the directory together with the other nodes of one job; gives the job's name.

        Who comes first, when nobody else holds it, names the job; `entered` is told whether that is this node, while no
        other one enters. A job that is over is not joined: with `waits` its last nodes have `OVER_SECONDS` to go.
        Raises UserError where a `train` holds it that shares nothing, and where the file system has no locks.
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
                raise _explain_in_use(self.path, "the last node of a job that is over")
            time.sleep(0.1)
        return self._job

    def end_job(self) -> None:
        """Nodes that come now wait for another job of the run: the nodes of this one meet no more."""
        if self._handle is not None and self._job:
            os.pwrite(self._handle, f"job {self._job}{_OVER}\n".encode(), 0)

    def is_held_by_others(self) -> bool:
        """Whether other nodes of the job hold the directory. Asked at the end: the lock may be lost by it."""
        try:
            if self._handle is not None and self._job:
                lock_handle(self._handle, seconds=0)
        except BlockingIOError:
            return True
        return False

    def release(self) -> None:
        """Let go of the directory."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle, self._job = None, ""

    @contextlib.contextmanager
    def enter_alone(self) -> Iterator[None]:
        """One node at a time makes the directory or joins the job. Raises UserError."""
        try:
            (self.path / MEETING).mkdir(exist_ok=True)
            handle = open_lock(self.path / MEETING / "entry")
        except OSError as error:
            raise explain_unwritable(self.path, error) from error
        try:
            lock_handle(handle)
            yield
        except FileNotFoundError as error:
            raise UserError(f"{self.path} was taken away: its run was refused.", "Give the command again.") from error
        except OSError as error:
            raise UserError(
                f"{self.path} lies on a file system without locks: {error.strerror or error}.",
                "The nodes of launch=elastic meet in the run directory, and need them.",
                "Choose another place:  train run.dir=...",
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
    """What to say where a directory cannot be made or written."""
    return UserError(
        f"cannot write the run directory {path}: {error.strerror or error}.",
        "Choose a directory that you may write to and that has room:  train run.dir=...",
    )


def _explain_in_use(path: Path, holder: str) -> UserError:
    return UserError(
        f"{path} is in use: another train, {holder}, is running in it.",
        "Wait for it or end it; a second run needs a directory of its own (run.dir=...).",
    )


@cache
def _say_unlocked(file_system: int) -> None:
    """Note once for each file system that it has no locks; the run goes on without."""
    note = "train: note: the file system of the run directory knows no locks; see to it that one train alone uses it."
    print(note, file=sys.stderr, flush=True)
