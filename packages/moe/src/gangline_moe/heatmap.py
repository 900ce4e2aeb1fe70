"""The tracker `experts`: pictures of the experts' load for TensorBoard."""

from __future__ import annotations

import struct
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from gangline.record import StepRecord
from gangline.track.base import Start, Tracker
from gangline_moe.parts import Heatmap
from gangline_moe.report import rgb
from gangline_moe.sight import Told, layers_of, loads_of, shares

if TYPE_CHECKING:
    from gangline.config.schema import Run

PIXELS = 12  # of a cell
TAG = "experts/load"


class HeatmapTracker(Tracker):
    """A picture each `every` steps: a row of cells for each layer, coloured by each expert's load over the mean."""

    def __init__(self, path: str | None, every: int) -> None:
        self.path, self.every = path, every
        self.steps: list[Told] = []
        self.file: Any = None

    def begin(self, start: Start) -> None:
        directory = Path(self.path) if self.path else Path(start.directory) / "tensorboard" / "experts"
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.experts.{start.first_step}"
        self.file = (directory / name).open("ab")
        self.writer = RecordWriter(self.file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def record(self, record: StepRecord) -> None:
        loads = loads_of(dict(record.metrics))
        if loads:
            self.steps.append(Told(record.step, loads, {}))
        if self.steps and record.step % self.every == 0:
            self._draw(record.step)

    def end(self, summary: dict[str, Any]) -> None:
        if self.steps:
            self._draw(self.steps[-1].step)
        if self.file is not None:
            self.file.close()
            self.file = None

    def _draw(self, step: int) -> None:
        table = [shares(self.steps, layer) for layer in layers_of(self.steps)]
        width, height = max(map(len, table)), len(table)
        image = Summary.Image(height=height * PIXELS, width=width * PIXELS, colorspace=3)
        image.encoded_image_string = png(table)
        summary = Summary(value=[Summary.Value(tag=TAG, image=image)])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))
        self.file.flush()
        self.steps = []

    def _write(self, event: Event) -> None:
        self.writer.write(event.SerializeToString())


def png(table: list[list[float]]) -> bytes:
    """A picture of cells, 8-bit RGB (PNG specification, W3C, sections 5 and 11)."""
    width = max(map(len, table))
    rows = []
    for values in table:
        cells = [bytes(rgb(value)) for value in values] + [b"\xff\xff\xff"] * (width - len(values))
        rows += [b"\0" + b"".join(cell * PIXELS for cell in cells)] * PIXELS
    header = struct.pack(">IIBBBBB", width * PIXELS, len(rows), 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b"")]
    found = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(found)


def build(config: Heatmap, run: Run) -> HeatmapTracker:
    """Pictures for TensorBoard."""
    return HeatmapTracker(config.path, config.every)
