"""How many processes a run has on how many nodes, and how many of them a layout can use. Torch-free."""

from __future__ import annotations

import os
import re
from copy import copy
from typing import TYPE_CHECKING

from gangline.errors import Problem, UserError

if TYPE_CHECKING:
    from gangline.config.schema import Run

NAME = "GANGLINE_NODE"  # the variable that names this node, by an address at which the others reach it


def name_of_this_node() -> str:
    """How the other nodes of the job reach this one: what GANGLINE_NODE says, else the machine's own name."""
    return os.environ.get(NAME) or os.uname().nodename


def machine_of(node: str) -> str:
    """Return the machine of a node; several nodes of one machine are named "MACHINE/NUMBER"."""
    return node.partition("/")[0]


def fewest_and_most(nodes: str) -> tuple[int, int]:
    """Of `launch.nodes`: "2:3" -> (2, 3), "2" -> (2, 2). Raises UserError."""
    found = re.fullmatch(r"\s*(\d+)(?::(\d+))?\s*", str(nodes))
    fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if fewest < 1:
        raise UserError(
            f"launch.nodes={nodes} is no number of nodes.",
            "It is how many take part, or the fewest and the most: launch.nodes=2 or launch.nodes=2:3.",
        )
    if fewest > most:
        raise UserError(
            f"launch.nodes={nodes}: the fewest nodes, {fewest}, are more than the most, {most}.",
            "The job starts and goes on with at least the first number, and has never more than the second.",
            f"launch.nodes={most}:{fewest}",
        )
    return fewest, most


def usable(run: Run, world: int) -> tuple[int, list[Problem]]:
    """(how many of `world` ranks train, why no more do): the largest number that a layout and the batch allow.

    0 ranks where none does; then the problems are those of all ranks together. Axes and batch are asked first: that
    takes a ten-thousandth of the whole check, and nearly all numbers fail there.
    """
    from gangline.config.check import layout_problems, problems

    reasons: list[Problem] = []
    for ranks in range(world, 0, -1):
        candidate = copy(run)
        candidate.launch = copy(run.launch)
        candidate.launch.processes = ranks
        if not (found := layout_problems(candidate) or problems(candidate)):
            return ranks, reasons
        reasons = reasons or found
    return 0, reasons


class UsableRanks:
    """`usable` of one run with `most` ranks at the most, remembered: nodes come and go, and the others wait for it."""

    def __init__(self, run: Run, most: int | None) -> None:
        self._run, self._most = run, most
        self._known: dict[int, tuple[int, list[Problem]]] = {}

    def __call__(self, ranks: int) -> tuple[int, list[Problem]]:
        ranks = min(ranks, self._most or ranks)
        if ranks not in self._known:
            self._known[ranks] = usable(self._run, ranks)
        return self._known[ranks]
