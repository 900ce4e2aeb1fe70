"""Notes for the user about saves and loads, stored until the run collects them. Torch-free."""

from __future__ import annotations


class Notes:
    """Collector of note lines, which any thread may add. A line is not added again before `take` has returned it."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        """Add a line, unless an equal line waits for `take`."""
        if line not in self._lines:
            self._lines.append(line)

    def take(self) -> list[str]:
        """Return all lines added since the last call."""
        lines, self._lines = self._lines, []
        return lines
