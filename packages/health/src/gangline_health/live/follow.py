"""Reader of new complete lines of a growing file, as JSON. Torch-free."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gangline.storage.files import open_regular


class Follower:
    """Reader that returns each complete line once; a line that is not a JSON object is skipped."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def read_lines(self) -> list[dict[str, Any]]:
        """Return the lines since the last call; all lines if the file is shorter than before."""
        return list(self.iterate())

    def iterate(self) -> Iterator[dict[str, Any]]:
        """Yield the lines since the last call, one by one; `offset` is the end of the line yielded last."""
        try:
            with open_regular(self.path, sys.maxsize) as file:
                if file.seek(0, 2) < self.offset:
                    self.offset = 0
                file.seek(self.offset)
                content = file.read()
        except OSError:
            return
        for line in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
            self.offset += len(line)
            try:
                read = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(read, dict):
                yield read
