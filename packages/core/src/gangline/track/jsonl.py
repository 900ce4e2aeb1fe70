"""metrics.jsonl: one record a line, no step twice."""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gangline.record import StepRecord
from gangline.track.base import Start, Tracker

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline.track.config import JsonLines

FILE = "metrics.jsonl"


class JsonLinesTracker(Tracker):
    """Appends each record as it comes; a write is so cheap that nothing waits in a buffer for a kill to lose it."""

    def __init__(self, path: str | None) -> None:
        self.path = None if path is None else Path(path)
        self.file: IO[bytes] | None = None
        self.last = 0

    def begin(self, start: Start) -> None:
        path = self.path or Path(start.directory) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.file = path.open("r+b", buffering=0)
        self._forget_after(start.first_step)

    def record(self, record: StepRecord) -> None:
        assert self.file is not None
        if record.step <= self.last:  # the run went back
            self._forget_after(record.step - 1)
        self.file.write(record.to_json().encode() + b"\n")
        self.last = record.step

    def end(self, summary: dict[str, Any]) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def _forget_after(self, step: int) -> None:
        """Drop what the file's end says of later steps, and a line that a kill tore."""
        assert self.file is not None
        end = self.file.seek(0, 2)
        if end:
            with mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
                while end and _step(content[content.rfind(b"\n", 0, end - 1) + 1 : end]) > step:
                    end = content.rfind(b"\n", 0, end - 1) + 1
            self.file.truncate(end)
            self.file.seek(end)
        self.last = step


def _step(line: bytes) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def build(config: JsonLines, run: Run) -> JsonLinesTracker:
    """Records as JSON lines."""
    return JsonLinesTracker(config.path)
