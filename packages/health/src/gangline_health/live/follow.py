"""New whole lines of a file that grows, as JSON. Torch-free."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gangline.storage.files import open_regular


class Follower:
    """Gives every line once. A line that is still being written comes later; what is no JSON is left out."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def read_lines(self) -> list[dict[str, Any]]:
        """Those since the last call; of a file that is shorter than it was, all."""
        return list(self.iterate())

    def iterate(self) -> Iterator[dict[str, Any]]:
        """The same, one by one: `offset` is the end of the line that was given last."""
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
