"""Curves for TensorBoard, written with TensorBoard's own record writer, without torch or tensorflow."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from gangline.record import StepRecord, list_numbers
from gangline.storage.files import open_own
from gangline.track import Start, Tracker

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline_basics.track.config import TensorBoard

FLUSH_SECONDS = 1.0
BINS = 30


class TensorBoardTracker(Tracker):
    """Tracker that writes one event per step, with all numbers of the step's record; flushed once a second."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.file: IO[bytes] | None = None
        self.last = 0
        self.flushed = 0.0

    def begin(self, start: Start) -> None:
        directory = Path(self.path) if self.path else Path(start.directory) / "tensorboard"
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{start.first_step}"
        self.file = open_own(directory / name, "ab")
        self.writer = RecordWriter(self.file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._start_over(start.first_step)

    def record(self, record: StepRecord) -> None:
        if record.step <= self.last:  # the run rewound to an earlier step
            self._start_over(record.step - 1)
        summary = Summary(value=[_make_value(tag, number) for tag, number in list_numbers(record).items()])
        self._write(Event(wall_time=time.time(), step=record.step, summary=summary))
        self.last = record.step
        if time.monotonic() - self.flushed > FLUSH_SECONDS and self.file is not None:
            self.file.flush()
            self.flushed = time.monotonic()

    def end(self, summary: dict[str, Any]) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def _start_over(self, step: int) -> None:
        """Make TensorBoard drop all points after `step`, which belong to an abandoned branch of the run."""
        if step > 0 or self.last:
            self._write(Event(wall_time=time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START)))
        self.last = step

    def _write(self, event: Event) -> None:
        self.writer.write(event.SerializeToString())


def _make_value(tag: str, value: float | list[float]) -> Summary.Value:
    if isinstance(value, list):
        return Summary.Value(tag=tag, histo=make_histogram(value))
    return Summary.Value(tag=tag, simple_value=value)


def make_histogram(values: list[float]) -> HistogramProto:
    """Return the histogram of the finite values in at most `BINS` bins; empty if no value is finite."""
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return HistogramProto()
    try:
        counts, edges = np.histogram(finite, bins=BINS)
    except ValueError:  # fewer floating-point numbers lie between minimum and maximum than there are bins
        counts, edges = np.histogram(finite, bins=1)
    return HistogramProto(
        min=finite.min(),
        max=finite.max(),
        num=len(finite),
        sum=finite.sum(),
        sum_squares=(finite**2).sum(),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )


def build(config: TensorBoard, run: Run) -> TensorBoardTracker:
    """Return the tracker for TensorBoard."""
    return TensorBoardTracker(config.path)
