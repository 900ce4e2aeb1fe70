"""Where a rank's output goes: logs/rank-00000.log and so on; rank 0 alone also keeps the terminal. Torch-free."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, TextIO

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def log_path(logs: Path, rank: int) -> Path:
    """The log of a rank."""
    return logs / f"rank-{rank:05d}.log"


def divert(logs: Path, rank: int) -> TextIO:
    """Send this process's output where it belongs; gives the open log. A restart appends to it."""
    log = log_path(logs, rank).open("a", buffering=1)
    if rank == 0:
        sys.stdout, sys.stderr = Copied(sys.stdout, log), Copied(sys.stderr, log)
        return log
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return log


class Copied:
    """A stream whose finished lines also go to a log, as a reader would see them: no colours, no overwritten text."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream = stream
        self._log = log
        self._line = ""

    def write(self, text: str) -> int:
        *lines, rest = text.split("\n")
        for line in lines:
            self._log.write(_CONTROL.sub("", self._line + line).rsplit("\r", 1)[-1] + "\n")
            self._line = ""
        self._line = (self._line + rest).rsplit("\r", 1)[-1]  # a progress line writes over itself for hours
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
