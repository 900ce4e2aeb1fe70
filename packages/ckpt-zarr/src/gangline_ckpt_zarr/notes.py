"""What people should know of saves and loads, until the run asks for it. Torch-free."""

from __future__ import annotations


class Notes:
    """Lines from any thread, each kept once."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        """Keep a line, unless it is there already."""
        if line not in self._lines:
            self._lines.append(line)

    def take(self) -> list[str]:
        """All that was added since the last call."""
        lines, self._lines = self._lines, []
        return lines
