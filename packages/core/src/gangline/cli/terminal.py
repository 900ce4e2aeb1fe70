"""Output of commands on a terminal: control characters of files are escaped, and every locale can show it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

# Colors and moves of the cursor, which tables and progress bars need, stay. The title, the clipboard, the direction of
# text and everything else that a terminal obeys is escaped.
_STEERS = re.compile(
    r"\x1b(?!\[[\d;?]*[mAGHJKhl])|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


class TerminalStream:
    """A text stream to a terminal. Sequences that steer the terminal are written as escapes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text; its length."""
        self._stream.write(_STEERS.sub(lambda found: repr(found[0])[1:-1], text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write all lines, one after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def escape_streams() -> Iterator[None]:
    """Until the end stdout and stderr escape what steers a terminal, and letters that their encoding lacks."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if hasattr(stream, "reconfigure") and (stream.encoding or "").lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (
        TerminalStream(stream) if stream is not None and stream.isatty() else stream for stream in before
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def format_quantity(number: float) -> str:
    """12345 -> 12.3 k"""
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 1000 or unit == "T":
            return f"{number:.3g} {unit}" if unit else f"{number:.3g}"
        number /= 1000
    return ""
