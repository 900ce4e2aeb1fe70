"""Generation: number of a start of the run's ranks, counted from 1 over all jobs of the run directory.

The process that starts the ranks counts generations (`advance`), and all nodes of a start get the same number at the
rendezvous; an agent's own restart count differs between nodes that joined at different times. Code that writes into the
run directory does so within `hold`, so a rank of an older generation, on a disconnected node, cannot write. Ranks
never write the generation file, so a rank that was suspended within `hold` cannot set it back. Torch-free.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gangline.storage.files import LINES_BYTES, lock_handle, open_handle, open_lock, read_regular

VARIABLE = "GANGLINE_GENERATION"
FILE = ".generation"
STEP = ".step"  # file with the largest number of steps done, written by ranks
_EVENTS = "events.jsonl"
HELD_SECONDS = 5.0  # timeout of a new start that waits for ranks in `hold`, which may be suspended


class Fenced(Exception):
    """Error of a rank of an older generation, which must not write because a newer start of the run has begun."""


@dataclass(frozen=True)
class Progress:
    """Counts of a run's starts, stored in the run directory.

    generation  number of the newest generation
    step        largest number of steps ever done
    best        value of `step` when the newest generation began
    futile      number of consecutive starts after a failure or a response without a new step, also across jobs
    restarts    number of starts after a failure or a response in this job
    responses   number of starts after a response in this job
    """

    generation: int = 0
    step: int = 0
    best: int = 0
    futile: int = 0
    restarts: int = 0
    responses: int = 0

    @property
    def futile_restarts(self) -> int:
        """Number of consecutive restarts of this job without a new step, before the newest start."""
        return max(0, min(self.futile, self.restarts - 1))  # the first start of a job is not a restart

    @property
    def failed(self) -> int:
        """Number of restarts of this job after a failure."""
        return self.restarts - self.responses


def read_generation(environ: Mapping[str, str] = os.environ) -> int:
    """Return the generation of this rank; under another agent, such as torchrun, the agent's restart count plus 1."""
    return int(environ.get(VARIABLE) or int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1)


def read_progress(run_dir: str | Path) -> Progress:
    """Return the stored counts; zeros for a run that never started."""
    path = Path(run_dir) / FILE
    return _add_steps(run_dir, read_regular(path)) if path.exists() else Progress()


def advance(
    run_dir: str | Path, counts: bool = False, first: bool = False, failed: bool = False, response: bool = False
) -> Progress:
    """Begin a generation. counts: whether it follows a failure or a response; response: whether it follows a response;
    first: whether it is the job's first; failed: whether the previous job failed, so that its futile starts count.
    """
    with _lock(run_dir, seconds=HELD_SECONDS) as handle:
        now = _add_steps(run_dir, os.pread(handle, 4096, 0))
        step = max(now.step, now.best)
        futile = 0 if step > now.best or (first and not failed) else now.futile + counts
        restarts = 0 if first else now.restarts + counts
        responses = 0 if first else now.responses + response
        now = Progress(now.generation + 1, step, step, futile, restarts, responses)
        os.pwrite(handle, json.dumps(asdict(now)).ljust(256).encode(), 0)  # never shorter than the old content
        return now


@contextmanager
def hold(run_dir: str | Path, step: int = 0) -> Iterator[None]:
    """Hold off newer generations during the block. Raises Fenced if one has begun. step: number of steps done.

    Has no effect without a launcher that counts generations.
    """
    if VARIABLE not in os.environ or not (Path(run_dir) / FILE).exists():
        yield
        return
    with _lock(run_dir, shared=True) as handle:
        now = _recover(run_dir, os.pread(handle, 4096, 0))
        if now.generation > read_generation():
            raise Fenced(f"generation {now.generation} has started, and this rank is of generation {read_generation()}")
        if step > max(now.step, read_most_steps(run_dir)):
            _put_steps(run_dir, step)
        yield


@contextmanager
def _lock(run_dir: str | Path, *, shared: bool = False, seconds: float | None = None) -> Iterator[int]:
    handle = open_lock(Path(run_dir) / FILE)
    try:
        with suppress(OSError):  # a timeout, or a file system without locks, which the user knows from a note
            lock_handle(handle, shared=shared, seconds=seconds)
        yield handle
    finally:
        os.close(handle)


def _add_steps(run_dir: str | Path, content: bytes) -> Progress:
    now = _recover(run_dir, content)
    return replace(now, step=max(now.step, read_most_steps(run_dir)))


def _recover(run_dir: str | Path, content: bytes) -> Progress:
    """Return the stored counts; for a damaged file only the generation from events.jsonl, so no number is reused."""
    try:
        return Progress(**json.loads(content))
    except (ValueError, TypeError):
        return Progress(generation=_find_told(Path(run_dir) / _EVENTS))


def _find_told(events: Path) -> int:
    newest = 0
    for line in read_regular(events, LINES_BYTES).splitlines() if events.exists() else ():
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            newest = max(newest, int(json.loads(line)["generation"]))
    return newest


def read_most_steps(run_dir: str | Path) -> int:
    """Return the largest number of steps that a run has ever done; 0 if it is not known."""
    try:
        return int(read_regular(Path(run_dir) / STEP))
    except (FileNotFoundError, ValueError):
        return 0


def _put_steps(run_dir: str | Path, step: int) -> None:
    handle = open_handle(Path(run_dir) / STEP, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        os.pwrite(handle, f"{step:20}".encode(), 0)
    finally:
        os.close(handle)
