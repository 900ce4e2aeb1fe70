"""Where a rank's output goes: logs/rank-00000.log and so on; rank 0 alone also keeps the terminal. Torch-free."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from gangline.storage.files import open_own

_SEQUENCE = r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]?."
_CONTROL = re.compile(rf"{_SEQUENCE}|[\x00-\x08\x0b-\x1f\x7f]")
_BEGINS = re.compile(rf"(?:{_SEQUENCE}|\r)*")
_UP = re.compile(r"\x1b\[\d*A")  # to the line above, which is then drawn over
_DRAWN = re.compile(r"\r|\x1b\[2K")
_READER_GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader, a terminal that was closed


def log_path(logs: Path, rank: int) -> Path:
    """The log of a rank."""
    return logs / f"rank-{rank:05d}.log"


def divert(logs: Path, rank: int) -> TextIO:
    """Send this process's output where it belongs; gives the open log. A restart appends to it."""
    log: Any = open_own(log_path(logs, rank), "a", buffering=1)
    if rank == 0:
        sys.stdout, sys.stderr = Copied(sys.stdout, log), Copied(sys.stderr, log)
        return log
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return log


@contextlib.contextmanager
def outlive_readers() -> Iterator[None]:
    """Keep this process running within the block when the reader of its output is gone (`| head`, a closed ssh)."""
    before = sys.stdout, sys.stderr
    streams = [stream and DetachableStream(stream) for stream in before]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in streams:
            if stream is not None:
                stream.flush()  # at the exit of Python it would fail
        sys.stdout, sys.stderr = before


class OutlivingStream(ABC):
    """A text stream that outlives its reader: output to a closed pipe or terminal is discarded."""

    def __init__(self, stream: TextIO) -> None:
        # only one of two notices that the reader is gone
        self._stream: TextIO = stream._stream if isinstance(stream, DetachableStream) else stream

    @abstractmethod
    def write(self, text: str) -> int:
        """Write text; return its number of characters."""

    def _pass_on(self, text: str) -> int:
        self._try_write(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try_write(self._stream.flush)

    def _try_write(self, output: Callable[[], Any]) -> None:
        try:
            output()
        except OSError as error:
            if error.errno not in _READER_GONE:
                raise
            self._detach(error)

    def _detach(self, error: OSError) -> None:
        """Send what is buffered, and all further output, to /dev/null."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class DetachableStream(OutlivingStream):
    """A stream that passes on its text as it is."""

    def write(self, text: str) -> int:
        return self._pass_on(text)


class Copied(OutlivingStream):
    """A stream whose finished lines also go to a log, as a reader would see them: no colours, no overwritten text."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        super().__init__(stream)
        self._log = log
        self._line = ""
        self._drawn = False  # whether the line under way has been written over
        self._held = ""  # a finished line that was written over: what follows may begin with the way back up to it

    def write(self, text: str) -> int:
        *lines, rest = text.split("\n")
        for line in lines:
            self._add(line)
            self._keep(self._held)
            self._held = ""
            shown = _CONTROL.sub("", self._line) + "\n"
            if self._drawn:
                self._held = shown
            else:
                self._keep(shown)
            self._line, self._drawn = "", False
        self._add(rest)
        return self._pass_on(text)

    def _detach(self, error: OSError) -> None:
        super()._detach(error)
        self._keep(f"train: note: output failed: {error.strerror}; it continues in this log alone\n")

    def _keep(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the run, nor keep its reason from the terminal
            self._log.write(text)

    def _add(self, text: str) -> None:
        """More of the line under way; what it writes over is forgotten, for a progress line does so for hours."""
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
