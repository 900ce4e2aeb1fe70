"""Files that outlive a loss of power: what a document names is on the disk before the document is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def sync_folder(folder: Path) -> None:
    """The names in a directory onto the disk, where the system can: a rename alone is not."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network file systems refuse it for directories
        pass
    finally:
        os.close(handle)


def replace_bytes(path: Path, content: bytes, tag: str = "") -> None:
    """A file on disk, durable, at once or not at all; and before it every name that its directory has by now.

    tag  in the name that it has until it is whole, where several processes may write it at once
    """
    waiting = path.with_name(f".{path.name}{tag}.part")
    with waiting.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
    waiting.replace(path)
    sync_folder(path.parent)


def replace_json(path: Path, content: dict[str, Any], tag: str = "") -> None:
    """A document, as `replace_bytes`; with a tag without line breaks, for machines alone."""
    replace_bytes(path, json.dumps(content, indent=None if tag else 1).encode(), tag)
