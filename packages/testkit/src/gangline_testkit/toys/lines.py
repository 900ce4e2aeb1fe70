"""Toy tracker: a text file with one line per step."""

from __future__ import annotations

from pathlib import Path

from gangline.config.schema import Run
from gangline.record import StepRecord
from gangline.track import Start, Tracker
from gangline_testkit.toys.plugin import LineFile


class LinesTracker(Tracker):
    """Tracker that writes the step and loss of each step to RUN_DIR/lines.txt."""

    def __init__(self, config: LineFile, run: Run) -> None:
        self.path = Path(run.job.dir or ".") / "lines.txt"

        self.last = 0

    def begin(self, start: Start) -> None:
        self.forget_after(start.first_step)

    def record(self, record: StepRecord) -> None:
        if record.step <= self.last:  # the run was rolled back
            self.forget_after(record.step - 1)
        with self.path.open("a") as file:
            file.write(f"{record.step} {record.loss!r}\n")
        self.last = record.step

    def forget_after(self, step: int) -> None:
        """Remove the lines of steps after `step` from the file."""
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        self.path.write_text("".join(line for line in lines if int(line.split()[0]) <= step))
        self.last = step
