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
            f"launch.nodes={nodes} must be a number of nodes, or a minimum and a maximum.",
            "Examples:  launch.nodes=2  or  launch.nodes=2:3",
        )
    if fewest > most:
        raise UserError(
            f"launch.nodes={nodes}: the minimum {fewest} exceeds the maximum {most}.",
            "The job runs with at least the first number of nodes, and at most the second.",
            f"launch.nodes={most}:{fewest}",
        )
    return fewest, most
