"""Paths of rank logs, and output streams that survive the end of their reader. Torch-free."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

_READER_GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader, a closed terminal


def log_path(logs: Path, rank: int) -> Path:
    """Return the path of the log file of a rank."""
    return logs / f"rank-{rank:05d}.log"


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
                stream.flush()  # a flush at the exit of Python would fail
        sys.stdout, sys.stderr = before


class OutlivingStream(ABC):
    """A text stream that outlives its reader: output to a closed pipe or terminal is discarded."""

    def __init__(self, stream: TextIO) -> None:
        # if nested, only one of the two streams would notice that the reader is gone
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
        """Send the buffered text and all further output to /dev/null."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class DetachableStream(OutlivingStream):
    """A stream that survives the end of its reader and does not change its text."""

    def write(self, text: str) -> int:
        return self._pass_on(text)
