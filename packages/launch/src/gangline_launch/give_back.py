"""What a dry run does with the directory that it was given. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gangline.tools import RunDirectory


def give_back(directory: RunDirectory) -> int:
    """Nothing was submitted: a new directory goes, one that was there is as it was. 0, an exit code."""
    directory.put_back()
    if not directory.discard():
        directory.unlock()
    return 0
