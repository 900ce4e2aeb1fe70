"""Number of nodes of a job, and the machines that they run on. Torch-free."""

from __future__ import annotations

import re

from gangline.errors import UserError


def get_machine(node: str) -> str:
    """Return the machine of a node; several nodes of one machine are named "MACHINE/NUMBER"."""
    return node.partition("/")[0]


def parse_nodes(nodes: str) -> tuple[int, int]:
    """Return (minimum, maximum) of `launch.nodes`: "2:3" -> (2, 3), "2" -> (2, 2). Raises UserError."""
    match = re.fullmatch(r"\s*(\d+)(?::(\d+))?\s*", str(nodes))
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
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
