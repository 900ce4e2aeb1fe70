"""metrics.jsonl: one record per line, append-only. `gangline.record.read_records` returns each step's newest record."""

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
    """Tracker that writes each record at once, unbuffered, so that a killed process loses no record.

    Records that do not fit on a full disk are written with a later record, so that no step is missing.
    """

    def __init__(self, path: str | None) -> None:
        self.path = None if path is None else Path(path)
        self.file: IO[bytes] | None = None
        self.left = b""  # unwritten bytes

    def begin(self, start: Start) -> None:
        path = self.path or Path(start.directory) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("ab+", buffering=0) if self.path else open_own(path, "ab+", buffering=0)
        end_line(self.file)

    def record(self, record: StepRecord) -> None:
        self.left += record.to_json().encode() + b"\n"
        self._write()

    def _write(self) -> None:
        """Write all unwritten bytes. Raises OSError if a write fails; the bytes not yet written stay in `left`."""
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
    """Return the tracker of JSON lines."""
    return JsonLinesTracker(config.path)
