"""Ranks started by torchrun or Slurm: rank 0 composes and writes the run directory, and the others get its path.

The external agent monitors and restarts ranks; this module starts none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gangline.errors import EXIT_USER_ERROR, UserError
from gangline.launch import requeue
from gangline.launch.detected import DetectedJob, detect
from gangline.run import generation
from gangline.run.directory import RunDirectory
from gangline.run.ending import EXIT_FAILURE, RunEnding, clear_ending, decide_ending, read_ending
from gangline.run.events import Events
from gangline_basics.launch import failures, forkserver, sidecars, worker
from gangline_basics.launch.before import StartBefore, identify_config, start_before
from gangline_basics.launch.starts import Starts, end

if TYPE_CHECKING:
    from torch.distributed import Store

COMPOSE_SECONDS = 600.0  # timeout in seconds for which the other ranks wait until rank 0 has composed the run

# Seconds that the other ranks wait before they exit after a refusal. As soon as one rank has exited, the agent ends all
# ranks, also rank 0, which must first print the reason.
REFUSED_SECONDS = 5.0

# Seconds that rank 0 waits until the rank that refused the run has reported, before it deletes the run directory.
REPORT_SECONDS = 5.0


def run_under_agent(
    compose_and_write: Callable[[], RunDirectory], target: str = worker.WORK, args: tuple[Any, ...] = ()
) -> NoReturn:
    """Train as one rank of the job that `detect` finds, and exit the process with the exit code of the rank.

    `compose_and_write` is called only on global rank 0 and returns the run directory; a directory that it created is
    deleted if a rank refuses the run before it has trained. A job restarted by its agent or the scheduler continues in
    its first run directory. If rank 0 refuses, all ranks end with the same exit code, and only rank 0 raises the
    UserError.
    """
    job = detect()
    assert job is not None, "the environment has no variables of torchrun or Slurm"
    os.environ.update(job.get_environment())
    forkserver.set_environment()
    store = _open_store(job)
    directory: RunDirectory | None = None
    if job.rank == 0:
        directory, number = _tell(job, store, compose_and_write)
        run_dir = str(directory.path.resolve())
    else:
        code, number, run_dir = _receive_end(job, store)
        if code:
            time.sleep(REFUSED_SECONDS)
            worker.leave(code)
    os.environ[generation.VARIABLE] = str(number)
    terminal = os.dup(sys.stderr.fileno())
    owned = _start_sidecars(run_dir) if job.local_rank == 0 else []
    code = worker.main(run_dir, target, args)
    _say_ending(job, Path(run_dir), number, code)
    if code in (0, EXIT_USER_ERROR):
        sidecars.stop(owned)  # after any other code, sidecars keep running for the next start, and end with the agent
    if code:
        _report(job, Path(run_dir, "logs"), terminal)
        _end_refused(job, store, directory, Path(run_dir, "logs"))
    worker.leave(code)


def _say_ending(job: DetectedJob, run_dir: Path, number: int, code: int) -> None:
    """Write ending.json and the exit event, on the rank that failed first, and on rank 0 if it knows the ending."""
    failure = failures.find_first(run_dir / "logs", number)
    if failure is not None and failure.rank == job.rank and failure.kind != "ended":
        if failure.kind != "restart":  # the agent may restart the rank
            Starts.end(run_dir, number, failure)
    elif job.rank == 0 and (ending := read_ending(run_dir) or _decide_done(number, code)):
        end(run_dir, ending)


def _decide_done(number: int, code: int) -> RunEnding | None:
    return decide_ending(number, done=True) if code == 0 else None


def _start_sidecars(run_dir: str) -> list[sidecars.Running]:
    specs = sidecars.list_sidecars(RunDirectory.open(run_dir).run())
    return sidecars.start(specs, run_dir, owner=os.getppid())


def _tell(job: DetectedJob, store: Store, compose_and_write: Callable[[], RunDirectory]) -> tuple[RunDirectory, int]:
    """Find or write the run directory on rank 0, begin a generation, and send both, or an exit code, to other ranks."""
    try:
        directory = requeue.find_earlier(job.key, job.restarts) or compose_and_write()
        directory.lock()
        requeue.remember(job.key, directory.path)
        first = job.restarts == 0 or job.agent != "torchrun"
        why, before = ("start", start_before(directory.path)) if first else _explain_restart(directory)
        if first:
            failures.clear(directory.logs)
        clear_ending(directory.path)
        now = generation.advance(directory.path, counts=not first or before.failed, first=first, failed=before.failed)
        _tell_events(job, directory.path, now, why, before)
    except BaseException as error:
        code = error.exit_code if isinstance(error, UserError) else EXIT_FAILURE
        store.set(_make_key(job), f"{code}:0:")
        _wait_until_read(job, store)
        raise
    store.set(_make_key(job), f"0:{now.generation}:{directory.path.resolve()}")
    return directory, now.generation


def _explain_restart(directory: RunDirectory) -> tuple[str, StartBefore]:
    """Return (why the agent restarts the ranks, facts about the failure). A killed rank leaves no record."""
    failure = failures.find_first(directory.logs, generation.read_progress(directory.path).generation)
    if failure is None:
        return "rank", StartBefore(evidence="a rank was lost")
    why = "response" if failure.kind == "restart" else "rank"
    return why, StartBefore(evidence=failure.what if why == "response" else failure.evidence, member=failure.member)


def _tell_events(job: DetectedJob, run_dir: Path, now: generation.Progress, why: str, before: StartBefore) -> None:
    events = Events(run_dir, now.generation, by="launcher")
    events.write(
        "launch",
        nodes=[socket.gethostname()],
        processes=job.world,
        spares=0,
        why=why,
        evidence=before.evidence,
        found=None if why == "start" else _read_end_time(run_dir, now.generation - 1),
        futile=now.futile,
        member=before.member,
        after=before.after,
        config=identify_config(run_dir),
    )
    events.close()


def _read_end_time(run_dir: Path, number: int) -> str | None:
    """Return when start `number` failed: when its first failure was written. An external agent records no time."""
    at = failures.find_time(run_dir / "logs", number)
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _receive_end(job: DetectedJob, store: Store) -> tuple[int, int, str]:
    """Return the exit code, and if it is 0 the generation and the run directory, on ranks other than 0."""
    code, number, run_dir = store.get(_make_key(job)).decode().split(":", 2)
    store.add(_make_key(job) + "/read", 1)
    return int(code), int(number), run_dir


def _wait_until_read(job: DetectedJob, store: Store) -> None:
    """Wait until the other ranks have read the exit code, because the store ends with rank 0 if rank 0 serves it."""
    _wait_for_others(job, store, "read", 30)


def _wait_for_others(job: DetectedJob, store: Store, what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while store.add(f"{_make_key(job)}/{what}", 0) < job.world - 1 and time.monotonic() < deadline:
        time.sleep(0.05)


def _end_refused(job: DetectedJob, store: Store, made: RunDirectory | None, logs: Path) -> None:
    """Delete the directory of a refused run; rank 0, which created it, first waits until all ranks have reported."""
    failure = failures.find_first(logs, generation.read_generation())
    with contextlib.suppress(RuntimeError):  # the store ends with rank 0
        if made is None:
            store.add(f"{_make_key(job)}/reported", 1)
        elif failure is not None and failure.kind == "user":
            _wait_for_others(job, store, "reported", REPORT_SECONDS)
    if made is not None and failure is not None and failure.kind == "user" and made.discard():
        requeue.forget(job.key)


def _open_store(job: DetectedJob) -> Store:
    """Return the job's store. The process group opens the store a second time, and shares its server.

    Raises UserError if another process has the port; only ranks that gangline starts itself get a free port.
    """
    from torch.distributed import DistNetworkError

    from gangline.comm.job_store import open_job_store

    try:
        return open_job_store(timedelta(seconds=COMPOSE_SECONDS), waits=False)
    except (OSError, DistNetworkError) as error:  # torch's error has no errno
        if getattr(error, "errno", None) != errno.EADDRINUSE and "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"port {job.port} at {job.address} is used by another process.",
            "The rendezvous of the ranks needs that port.",
            "Choose a free port:  torchrun --master-port=PORT"
            if job.agent == "torchrun"
            else "Set a free port in the environment of every rank:  MASTER_PORT=PORT",
        ) from error


def _make_key(job: DetectedJob) -> str:
    return f"gangline/run_dir/{job.restarts}"  # a key for each restart, because an agent's store outlives the ranks


def _report(job: DetectedJob, logs: Path, terminal: int) -> None:
    """Print the first failure, if this rank caused it, to `terminal`, which was stderr before output was diverted."""
    failure = failures.find_first(logs, generation.read_generation())
    if failure is None or failure.rank != job.rank or failure.kind == "ended":
        return
    if failure.kind == "restart" and job.restarts < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        return  # the agent restarts the rank
    text = f"train: {failure.make_error()}\n" if failure.kind == "user" else failures.report(failure, logs)
    os.write(terminal, text.encode())
