"""Tracker that sends records to a service on a separate thread: no step waits for it, and a kill loses no step.

The training loop puts records into a bounded queue and continues. The tracker's thread opens the run at the service
and reads the newest step there. It sends the missing steps from metrics.jsonl, up to the step at which this start
continues, and then new records.

Each step is therefore sent once. The next start sends the records that a kill left in the queue. A step that is
repeated after a kill or a rollback keeps the values that were sent first, because the history of a service cannot be
rewritten. metrics.jsonl and TensorBoard show the current branch of the run.

If the service raises an exception, the next call from the training loop raises TrackingFailed. Core reports the failure
once and removes the tracker.
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

BATCH = 200  # maximum number of records in one call of `Connection.send`
PAUSE = 5.0  # seconds to collect records for one `Connection.send`, because one call per record costs more


class TrackingFailed(RuntimeError):
    """Failure of a tracking service. The run continues without this tracker."""


class Connection(ABC):
    """Run at a tracking service. All methods are called on the tracker's thread, and may raise any exception."""

    @abstractmethod
    def open(self, start: Start) -> int:
        """Create or continue the run at the service, and return its newest step there; 0 if it has no steps."""

    @abstractmethod
    def send(self, records: list[StepRecord]) -> None:
        """Send records of new steps to the service, oldest first."""

    @abstractmethod
    def close(self, summary: dict[str, Any], notes: list[str], pictures: list[Path]) -> None:
        """End the run at the service. notes: console notes of this start; pictures: PNG files in the run directory."""


class BackgroundTracker(Tracker):
    """Tracker that sends records to a `Connection`, which its thread opens by `connect`. name: used in messages."""

    def __init__(self, name: str, config: Service, connect: Callable[[], Connection]) -> None:
        self.name, self.config, self.connect = name, config, connect
        self.waiting: queue.Queue[StepRecord | dict[str, Any]] = queue.Queue(config.queue + 1)
        self.notes: list[str] = []
        self.missed = 0
        self.failure = ""
        self.thread: threading.Thread | None = None
        self.until: float | None = None  # deadline of `end` on the monotonic clock, set by `start_end`

    # --- training loop's thread --------------------------------------------------------------------------------------

    def begin(self, start: Start) -> None:
        key = (self.name, start.directory)
        earlier, _LIVE[key] = _LIVE.get(key), self
        self.thread = threading.Thread(target=self._work, args=(start, earlier), name=f"track-{self.name}", daemon=True)
        self.thread.start()

    def record(self, record: StepRecord) -> None:
        self._raise_failure()
        if record.step % self.config.every and record.validation_loss is None:
            return
        if self.waiting.qsize() < self.config.queue:  # the last slot is for the summary; no other thread puts items
            self.waiting.put_nowait(record)
        else:
            self.missed += 1
            if self.missed == 1:
                self._say(
                    f"is slower than the run and drops steps from step {record.step} on; metrics.jsonl has all steps. "
                    f"To drop fewer:  track.{self.name}.every=10   or   track.{self.name}.queue=100000"
                )

    def note(self, text: str) -> None:
        self.notes.append(text)

    def start_end(self, summary: dict[str, Any]) -> None:
        """Put the summary into the queue without a wait, so that all services end at the same time."""
        if self.until is None:
            self.until = time.monotonic() + self.config.deadline_seconds
            self.waiting.put_nowait(summary)

    def end(self, summary: dict[str, Any]) -> None:
        """Wait until the service has ended, for at most `deadline_seconds` since `start_end`. Raises TrackingFailed."""
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
                f"did not finish within deadline_seconds={self.config.deadline_seconds:g}: "
                f"about {backlog} records are not sent; {SENT_LATER}"
            )
        elif self.missed:
            self._say(f"dropped {self.missed} steps because it was slower than the run; metrics.jsonl has all steps")

    def _compute_time_left(self) -> float:
        return 0.0 if self.until is None else max(0.0, self.until - time.monotonic())

    def _raise_failure(self) -> None:
        if self.failure:
            raise TrackingFailed(f"{self.failure}; {SENT_LATER}")

    def _say(self, text: str) -> None:
        print(f"train: track={self.name} {text}", file=sys.stderr, flush=True)

    # --- tracker's thread --------------------------------------------------------------------------------------------

    def _work(self, start: Start, earlier: BackgroundTracker | None) -> None:
        try:
            if earlier is not None:
                with suppress(TrackingFailed):
                    earlier.end({"why": "error"})
            self._serve(start)
        except BaseException as error:  # libraries of services may raise any exception, such as SystemExit
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
        """Send the steps of metrics.jsonl after `newest`, up to `start.first_step`; return the newest step sent."""
        path = Path(start.directory) / "metrics.jsonl"
        if newest >= start.first_step or not path.exists():
            return newest
        fields = StepRecord.__dataclass_fields__
        missing = [
            StepRecord(**{key: value for key, value in line.items() if key in fields})
            for line in read_records(path, lambda text: self._say(f"cannot send some earlier steps: {text}"))
            if newest < line["step"] <= start.first_step
            and (line["step"] % self.config.every == 0 or line.get("validation_loss") is not None)
        ]
        for first in range(0, len(missing), BATCH):
            connection.send(missing[first : first + BATCH])
        return missing[-1].step if missing else newest

    def _receive_records(self) -> tuple[list[StepRecord], dict[str, Any] | None]:
        """Wait for an item, collect more for up to `PAUSE` s, and return (records, summary, or None during the run)."""
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


_LIVE: dict[tuple[str, str], BackgroundTracker] = {}  # active trackers of this process, by name and run directory
SENT_LATER = "metrics.jsonl has all steps, and the next start of the run (resume=) sends missing steps"


def get_scalars(record: StepRecord) -> dict[str, float]:
    """Return {name: value} of all single numbers in a step record."""
    return {name: to_float(value) for name, value in list_numbers(record).items() if not isinstance(value, list)}


def get_lists(record: StepRecord) -> dict[str, list[float]]:
    """Return {name: finite values} of all lists in a step record; histograms accept only finite values."""
    lists = {name: map(to_float, value) for name, value in list_numbers(record).items() if isinstance(value, list)}
    return {name: [value for value in values if math.isfinite(value)] for name, values in lists.items()}


def to_float(value: float | str) -> float:
    """Return the value as a float; metrics.jsonl stores NaN and infinity as strings."""
    return float(value)


def flatten_options(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested options as {full name: value}, such as "batch.global_size"."""
    options: dict[str, Any] = {}
    for key, value in content.items():
        options |= flatten_options(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return options


def build(config: Service, run: Run) -> BackgroundTracker:
    """Return the tracker of a service. Its thread imports the library of the service, which takes seconds."""

    def connect() -> Connection:
        connection: Connection = importlib.import_module(config.home).connect(config)
        return connection

    return BackgroundTracker(config.extra, config, connect)
