"""A generation: which start of its ranks a run is in, counted from 1 over the whole life of the run directory.

Whoever starts the ranks counts (`advance`), and every member of the start is told the same number at the rendezvous; an
agent's own count of restarts is no such number, for members come and go. What writes into the run directory does so
within `hold`: a rank of an older generation, of a node that was cut off, writes nothing any more. Ranks never write the
file of the generation, so one that was stopped within `hold` cannot wind it back. Torch-free.
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
STEP = ".step"  # the most steps that were done: written by ranks
_EVENTS = "events.jsonl"
HELD_SECONDS = 5.0  # so long a new start waits for who writes; a rank that was stopped meanwhile loses its turn


class Fenced(Exception):
    """A newer start of the run has begun: this rank may write nothing more."""


@dataclass(frozen=True)
class Progress:
    """What the run directory keeps of its starts.

    generation  the newest
    step        the most steps that were ever done
    best        the same when the newest generation began
    futile      starts in a row, after a failure or an order, before which no new step was done; also over jobs
    restarts    starts after a failure or an order in this job
    ordered     those of them that were ordered
    """

    generation: int = 0
    step: int = 0
    best: int = 0
    futile: int = 0
    restarts: int = 0
    ordered: int = 0

    @property
    def futile_restarts(self) -> int:
        """Return the number of consecutive restarts of this job without a new step, if this is the next start."""
        return max(0, min(self.futile, self.restarts - 1))  # the first start of a job is not a restart

    @property
    def failed(self) -> int:
        """Of `restarts` those after a failure."""
        return self.restarts - self.ordered


def read_generation(environ: Mapping[str, str] = os.environ) -> int:
    """Of this rank; where an agent that is not ours started it, its count of restarts is all there is."""
    return int(environ.get(VARIABLE) or int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1)


def read_progress(run_dir: str | Path) -> Progress:
    """What is kept; of a run that never began, zeros."""
    path = Path(run_dir) / FILE
    return _add_steps(run_dir, read_regular(path)) if path.exists() else Progress()


def advance(
    run_dir: str | Path, counts: bool = False, first: bool = False, failed: bool = False, ordered: bool = False
) -> Progress:
    """Begin a generation. `counts`: it follows a failure or an order, `ordered`: the latter; `first`: it is the first
    of a job, and `failed` the one before it, so that what was futile there counts on.
    """
    with _lock(run_dir, seconds=HELD_SECONDS) as handle:
        now = _add_steps(run_dir, os.pread(handle, 4096, 0))
        step = max(now.step, now.best)
        futile = 0 if step > now.best or (first and not failed) else now.futile + counts
        restarts = 0 if first else now.restarts + counts
        orders = 0 if first else now.ordered + ordered
        now = Progress(now.generation + 1, step, step, futile, restarts, orders)
        os.pwrite(handle, json.dumps(asdict(now)).ljust(256).encode(), 0)  # always as long as before, or longer
        return now


@contextmanager
def hold(run_dir: str | Path, step: int = 0) -> Iterator[None]:
    """Within, no newer generation begins; raises Fenced where one has. `step`: so many steps are done.

    Without a launcher that counts generations nothing is checked.
    """
    if VARIABLE not in os.environ or not (Path(run_dir) / FILE).exists():
        yield
        return
    with _lock(run_dir, shared=True) as handle:
        now = _recover(run_dir, os.pread(handle, 4096, 0))
        if now.generation > read_generation():
            raise Fenced(f"generation {now.generation} of the run has begun, and this rank is of {read_generation()}")
        if step > max(now.step, read_most_steps(run_dir)):
            _put_steps(run_dir, step)
        yield


@contextmanager
def _lock(run_dir: str | Path, *, shared: bool = False, seconds: float | None = None) -> Iterator[int]:
    handle = open_lock(Path(run_dir) / FILE)
    try:
        with suppress(OSError):  # the time is over; or no locks here, and who uses the run directory has been told
            lock_handle(handle, shared=shared, seconds=seconds)
        yield handle
    finally:
        os.close(handle)


def _add_steps(run_dir: str | Path, content: bytes) -> Progress:
    now = _recover(run_dir, content)
    return replace(now, step=max(now.step, read_most_steps(run_dir)))


def _recover(run_dir: str | Path, content: bytes) -> Progress:
    """Of what a kill or a crash of the machine tore, the generation that events.jsonl has: none is given twice."""
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
    """The most steps of a run that were ever done; 0 where that is not known."""
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
