"""Terminal output of commands: control characters, and characters missing in the encoding, are escaped."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

# Keep colors and cursor movement, which tables and progress bars need. Escape the title, the clipboard, the text
# direction and everything else that a terminal obeys.
_STEERS = re.compile(
    r"\x1b(?!\[[\d;?]*[mAGHJKhl])|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


class TerminalStream:
    """A text stream to a terminal that escapes control sequences, except colors and cursor movement."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text with control sequences escaped; return the length of the unescaped text."""
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
    """Escape control sequences and characters missing in the encoding, on stdout and stderr within the block."""
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
