"""Output of a rank, written to the rank's log, and for rank 0 also to the terminal. Torch-free."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any, TextIO

from gangline.launch.output import OutlivingStream, log_path
from gangline.storage.files import open_own

_SEQUENCE = r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]?."
_CONTROL = re.compile(rf"{_SEQUENCE}|[\x00-\x08\x0b-\x1f\x7f]")
_BEGINS = re.compile(rf"(?:{_SEQUENCE}|\r)*")
_UP = re.compile(r"\x1b\[\d*A")  # cursor up, to overwrite the line above
_DRAWN = re.compile(r"\r|\x1b\[2K")


def divert(logs: Path, rank: int) -> TextIO:
    """Divert this process's output to its log, and return the open log. A restarted rank appends to the log."""
    log: Any = open_own(log_path(logs, rank), "a", buffering=1)
    if rank == 0:
        sys.stdout, sys.stderr = Copied(sys.stdout, log), Copied(sys.stderr, log)
        return log
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return log


class Copied(OutlivingStream):
    """Stream that also writes finished lines to a log, as the terminal shows them, but without colours."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        super().__init__(stream)
        self._log = log
        self._line = ""
        self._drawn = False  # True if the current line has overwritten text
        # last finished line, if it had overwritten text; the next output may move up and overwrite the line
        self._held = ""

    def write(self, text: str) -> int:
        *lines, rest = text.split("\n")
        for line in lines:
            self._add(line)
            self._keep(self._held)
            self._held = ""
            plain_line = _CONTROL.sub("", self._line) + "\n"
            if self._drawn:
                self._held = plain_line
            else:
                self._keep(plain_line)
            self._line, self._drawn = "", False
        self._add(rest)
        return self._pass_on(text)

    def _detach(self, error: OSError) -> None:
        super()._detach(error)
        self._keep(
            f"train: note: writing to the terminal failed: {error.strerror}; further output is only in this log\n"
        )

    def _keep(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must neither end the run nor silence the terminal
            self._log.write(text)

    def _add(self, text: str) -> None:
        """Add text to the current line, and drop overwritten text, so that a progress line does not grow for hours."""
        line = self._line + text
        begin = _BEGINS.match(line)
        assert begin is not None
        if _UP.search(begin[0]):
            self._held = ""
        elif begin.end() < len(line):
            self._keep(self._held)
            self._held = ""
        self._drawn |= bool(_DRAWN.search(line))
        self._line = line.rsplit("\r", 1)[-1]
