"""Durable file writes, safe against power loss: files that a JSON document names are on disk before the document."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gangline import UserError
from gangline.storage.files import sync_folder, write_whole

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Raise UserError in place of an OSError in the block, if the disk of `folder` is full or not writable."""
    try:
        yield
    except OSError as error:
        at = Path(error.filename).absolute() if isinstance(error.filename, str) else None
        root = folder.absolute()
        here = at is not None and (at == root or at in root.parents or root in at.parents)
        if error.errno not in FULL and not (error.errno in CLOSED and here):
            raise
        remedy = "Free disk space" if error.errno in FULL else "Make the path writable"
        raise UserError(
            f"{folder if at is None or here else at} cannot be written: {error.strerror}.",
            "Finished tasks of the preparation remain on disk.",
            f"{remedy}, and type the same command to continue.",
        ) from error


def replace_bytes(path: Path, content: bytes, tag: str = "") -> None:
    """Replace a file atomically and durably, after making all existing names in its directory durable.

    tag  part of the temporary name, for files that several processes may write at once
    """
    sync_folder(path.parent)
    write_whole(path, content, temporary=f".{path.name}{tag}.part")


def replace_json(path: Path, content: dict[str, Any], tag: str = "") -> None:
    """Replace a JSON file like `replace_bytes`: indented, or with a tag on one line, because only programs read it."""
    replace_bytes(path, json.dumps(content, indent=None if tag else 1).encode(), tag)
