"""metrics.jsonl: one record a line, append-only. `gangline.record.read_records` gives each step's newest."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gangline.record import StepRecord
from gangline.run.events import end_line
from gangline.storage.files import open_own
from gangline.track import Start, Tracker

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline_basics.track.config import JsonLines

FILE = "metrics.jsonl"


class JsonLinesTracker(Tracker):
    """Appends each record as it comes; a write is so cheap that nothing waits in a buffer for a kill to lose it.

    What does not fit on a full disk waits for the next record: with room again no step is missing.
    """

    def __init__(self, path: str | None) -> None:
        self.path = None if path is None else Path(path)
        self.file: IO[bytes] | None = None
        self.left = b""  # not written yet

    def begin(self, start: Start) -> None:
        path = self.path or Path(start.directory) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("ab+", buffering=0) if self.path else open_own(path, "ab+", buffering=0)
        end_line(self.file)

    def record(self, record: StepRecord) -> None:
        self.left += record.to_json().encode() + b"\n"
        self._write()

    def _write(self) -> None:
        """All that is left. Raises OSError where only a part could be written."""
        assert self.file is not None
        while self.left:
            self.left = self.left[self.file.write(self.left) or 0 :]

    def end(self, summary: dict[str, Any]) -> None:
        if self.file is not None:
            try:
                self._write()
            finally:
                self.file.close()
                self.file = None


def build(config: JsonLines, run: Run) -> JsonLinesTracker:
    """Records as JSON lines."""
    return JsonLinesTracker(config.path)
