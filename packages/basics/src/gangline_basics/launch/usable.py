"""Number of ranks of a job that a layout can use. Torch-free."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from gangline.config.check import find_layout_problems, find_problems
from gangline.errors import Problem

if TYPE_CHECKING:
    from gangline.config.schema import Run


def find_usable(run: Run, world: int) -> tuple[int, list[Problem]]:
    """Return (largest number of ranks up to `world` that layout and batch allow, or 0; problems of `world` ranks).

    Axes and batch are checked first. This check takes a ten-thousandth of the time of the full check, and nearly all
    numbers fail it.
    """
    reasons: list[Problem] = []
    for ranks in range(world, 0, -1):
        candidate = copy(run)
        candidate.launch = copy(run.launch)
        candidate.launch.processes = ranks
        if not (problems := find_layout_problems(candidate) or find_problems(candidate)):
            return ranks, reasons
        reasons = reasons or problems
    return 0, reasons
