"""Tracker `experts`: heatmaps of the experts' load for TensorBoard."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from gangline.record import StepRecord
from gangline.storage.files import open_own
from gangline.track import Start, Tracker
from gangline_basics.figure import render
from gangline_moe.config import Heatmap
from gangline_moe.load_history import StepLoads, get_loads
from gangline_moe.picture import draw_by_layer

if TYPE_CHECKING:
    from gangline.config import Run

TAG = "experts/load"


class HeatmapTracker(Tracker):
    """Tracker that draws a heatmap each `every` steps: a row per layer, a column per expert, coloured by load."""

    def __init__(self, path: str | None, every: int) -> None:
        self.path, self.every = path, every
        self.steps: list[StepLoads] = []
        self.file: Any = None

    def begin(self, start: Start) -> None:
        self.run = start.name
        directory = Path(self.path) if self.path else Path(start.directory) / "tensorboard" / "experts"
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.experts.{start.first_step}"
        self.file = open_own(directory / name, "ab")
        self.writer = RecordWriter(self.file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def record(self, record: StepRecord) -> None:
        loads = get_loads(record.metrics)
        if loads:
            self.steps.append(StepLoads(record.step, loads, {}))
        if self.steps and record.step % self.every == 0:
            self._draw(record.step)

    def end(self, summary: dict[str, Any]) -> None:
        if self.steps:
            self._draw(self.steps[-1].step)
        if self.file is not None:
            self.file.close()
            self.file = None

    def _draw(self, step: int) -> None:
        file = render(draw_by_layer(self.steps, self.run), ".png")
        width, height = struct.unpack(">II", file[16:24])
        image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=file)
        summary = Summary(value=[Summary.Value(tag=TAG, image=image)])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))
        self.file.flush()
        self.steps = []

    def _write(self, event: Event) -> None:
        self.writer.write(event.SerializeToString())


def build(config: Heatmap, run: Run) -> HeatmapTracker:
    """Build the tracker `experts`."""
    return HeatmapTracker(config.path, config.every)
