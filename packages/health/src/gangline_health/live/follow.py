"""Reader of the new complete lines of a growing JSONL file. Torch-free."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gangline.storage.files import open_regular


class Follower:
    """Reader that returns each complete line of a file once, from `offset` on; skips lines other than JSON objects."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def read_lines(self) -> list[dict[str, Any]]:
        """Return the complete lines since the last call; all lines if the file became shorter."""
        return list(self.iterate())

    def iterate(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines since the last call; `offset` is the end of the line that was yielded last."""
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
