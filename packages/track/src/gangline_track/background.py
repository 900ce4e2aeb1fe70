"""A service told of a run from a thread of its own: no step waits for it, and none is lost by a kill.

The loop's thread puts records in a bounded queue and goes on. The other thread opens the run at the service, asks which
step it has already, sends from metrics.jsonl what it lacks up to where the run goes on, and then what comes. So a step
is sent once: what a kill took from the queue is made up for by the next start, and a step that comes again, after a
kill or a way back, keeps the value it was first sent with. (A service's history cannot be rewritten; metrics.jsonl and
TensorBoard show the branch that the run is on.)

What the service raises is raised by the next call of the loop, which core says once and leaves the tracker out.
"""

from __future__ import annotations

import importlib
import math
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.record import StepRecord, list_numbers, read_records
from gangline.track import Start, Tracker
from gangline_track.config import Service

if TYPE_CHECKING:
    from gangline.config import Run

BATCH = 200  # records that are sent together
PAUSE = 5.0  # seconds between what is sent: records that come together cost less than one by one


class TrackingFailed(RuntimeError):
    """The service cannot be told any more; the run goes on without it."""


class Connection(ABC):
    """One run at a service. All of it is called on one thread, which is not the loop's; it may raise what it likes."""

    @abstractmethod
    def open(self, start: Start) -> int:
        """Begin the run there, or go on with it: the newest step that it has, 0 where it has none."""

    @abstractmethod
    def send(self, records: list[StepRecord]) -> None:
        """Steps in order, none of which it has."""

    @abstractmethod
    def close(self, summary: dict[str, Any], notes: list[str], pictures: list[Path]) -> None:
        """The end; notes: all lines of this start. pictures: PNG files of the run directory."""


class BackgroundTracker(Tracker):
    """The tracker of a `Connection`, which `connect` makes on the other thread; name: for what people are told."""

    def __init__(self, name: str, config: Service, connect: Callable[[], Connection]) -> None:
        self.name, self.config, self.connect = name, config, connect
        self.waiting: queue.Queue[StepRecord | dict[str, Any]] = queue.Queue(config.queue + 1)
        self.notes: list[str] = []
        self.missed = 0
        self.failure = ""
        self.thread: threading.Thread | None = None
        self.until: float | None = None  # when the end waits no more, once it has begun

    # --- on the loop's thread ----------------------------------------------------------------------------------------

    def begin(self, start: Start) -> None:
        key = (self.name, start.directory)
        earlier, _LIVE[key] = _LIVE.get(key), self
        self.thread = threading.Thread(target=self._work, args=(start, earlier), name=f"track-{self.name}", daemon=True)
        self.thread.start()

    def record(self, record: StepRecord) -> None:
        self._raise_failure()
        if record.step % self.config.every and record.validation_loss is None:
            return
        if self.waiting.qsize() < self.config.queue:  # the last place is the summary's; nobody else puts
            self.waiting.put_nowait(record)
        else:
            self.missed += 1
            if self.missed == 1:
                self._say(f"is slower than the run: from step {record.step} on it lacks steps; metrics.jsonl has all")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def start_end(self, summary: dict[str, Any]) -> None:
        """Never waits: while other trackers end one after another, this one's service is told of the end, too."""
        if self.until is None:
            self.until = time.monotonic() + self.config.deadline_seconds
            self.waiting.put_nowait(summary)

    def end(self, summary: dict[str, Any]) -> None:
        """Waits for the service until the deadline, and no longer. It is counted from `start_end`, where that was."""
        if self.thread is None:
            return
        self.start_end(summary)
        if self.thread.is_alive():
            self.thread.join(self._compute_time_left())
        late, self.thread = self.thread.is_alive(), None
        for key in [key for key, tracker in _LIVE.items() if tracker is self]:
            del _LIVE[key]
        self._raise_failure()
        if late:
            backlog = self.waiting.qsize()
            self._say(
                f"was left after {self.config.deadline_seconds:g} s with about {backlog} records to send; {SENT_LATER}"
            )
        elif self.missed:
            self._say(f"lacks {self.missed} steps, for it was slower than the run; metrics.jsonl has all")

    def _compute_time_left(self) -> float:
        return 0.0 if self.until is None else max(0.0, self.until - time.monotonic())

    def _raise_failure(self) -> None:
        if self.failure:
            raise TrackingFailed(f"{self.failure}; {SENT_LATER}")

    def _say(self, text: str) -> None:
        print(f"train: track={self.name} {text}", file=sys.stderr, flush=True)

    # --- on its own --------------------------------------------------------------------------------------------------

    def _work(self, start: Start, earlier: BackgroundTracker | None) -> None:
        try:
            if earlier is not None:
                with suppress(TrackingFailed):
                    earlier.end({"why": "error"})
            self._serve(start)
        except BaseException as error:  # a service may raise anything, SystemExit included
            first = str(error).strip().splitlines()
            self.failure = ": ".join([type(error).__name__, *first[:1]])

    def _serve(self, start: Start) -> None:
        connection = self.connect()
        newest = connection.open(start)
        newest = self._make_up(connection, start, newest)
        while True:
            records, summary = self._receive_records()
            fresh: list[StepRecord] = []
            for record in records:
                if record.step > newest:
                    fresh.append(record)
                    newest = record.step
            if fresh:
                connection.send(fresh)
            if summary is not None:
                pictures = sorted(Path(start.directory).glob("*.png"))
                connection.close(summary, list(self.notes), pictures)
                return

    def _make_up(self, connection: Connection, start: Start, newest: int) -> int:
        """Sends what metrics.jsonl has beyond `newest`, up to where the run goes on: the newest step sent."""
        path = Path(start.directory) / "metrics.jsonl"
        if newest >= start.first_step or not path.exists():
            return newest
        fields = StepRecord.__dataclass_fields__
        missing = [
            StepRecord(**{key: value for key, value in line.items() if key in fields})
            for line in read_records(path, lambda text: self._say(f"lacks steps: {text}"))
            if newest < line["step"] <= start.first_step
            and (line["step"] % self.config.every == 0 or line.get("validation_loss") is not None)
        ]
        for first in range(0, len(missing), BATCH):
            connection.send(missing[first : first + BATCH])
        return missing[-1].step if missing else newest

    def _receive_records(self) -> tuple[list[StepRecord], dict[str, Any] | None]:
        """Records that have come, and the summary once the run has ended: waits for the first, then a little."""
        records: list[StepRecord] = []
        until: float | None = None
        while len(records) < BATCH:
            try:
                timeout = None if until is None else max(0.0, until - time.monotonic())
                item = self.waiting.get(timeout=timeout)
            except queue.Empty:
                break
            if not isinstance(item, StepRecord):
                return records, item
            records.append(item)
            until = until or time.monotonic() + PAUSE
        return records, None


_LIVE: dict[tuple[str, str], BackgroundTracker] = {}  # of this process: what was begun and never ended
SENT_LATER = "metrics.jsonl has all, and the run's next start sends what is missing"


def get_scalars(record: StepRecord) -> dict[str, float]:
    """The numbers of a record that are one number each."""
    return {name: to_float(value) for name, value in list_numbers(record).items() if not isinstance(value, list)}


def get_lists(record: StepRecord) -> dict[str, list[float]]:
    """Return the finite numbers of each measurement that is a list: a histogram has no place for others."""
    lists = {name: map(to_float, value) for name, value in list_numbers(record).items() if isinstance(value, list)}
    return {name: [value for value in values if math.isfinite(value)] for name, values in lists.items()}


def to_float(value: float | str) -> float:
    """As a float; metrics.jsonl has one that is not finite as a string."""
    return float(value)


def flatten_options(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their whole names."""
    options: dict[str, Any] = {}
    for key, value in content.items():
        options |= flatten_options(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return options


def build(config: Service, run: Run) -> BackgroundTracker:
    """The tracker of a service. Its library is imported on the tracker's own thread, for that takes seconds."""

    def connect() -> Connection:
        connection: Connection = importlib.import_module(config.home).connect(config)
        return connection

    return BackgroundTracker(config.extra, config, connect)
