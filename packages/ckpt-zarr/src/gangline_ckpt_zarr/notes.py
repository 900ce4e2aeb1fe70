"""Notes for the user on saves and loads, stored until the run takes them. Torch-free."""

from __future__ import annotations


class Notes:
    """Lines added from any thread. A line that still waits to be taken is not added twice."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        """Add a line, unless it is already there."""
        if line not in self._lines:
            self._lines.append(line)

    def take(self) -> list[str]:
        """Return all lines added since the last call."""
        lines, self._lines = self._lines, []
        return lines
