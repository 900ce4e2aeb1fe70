"""Command `gangline health`: reports, live status, burn-in and failure simulation. Does not import torch.

Each subcommand is a module of this package, imported when the subcommand is called.
"""

from __future__ import annotations

from collections.abc import Sequence

from gangline.cli.verbs import run_verb

VERBS = {
    "report": "where every second of a run went, its faults, and the best that could be had",
    "burn-in": "measures every rank as training would use it; names the bad ones, writes a cluster file",
    "watch": "the page of a run that lives: loss, step, ranks, verdicts, the last checkpoint",
    "simulate": "what a job of N nodes over D days loses to failures",
}


def main(argv: Sequence[str]) -> int:
    """Run the command `gangline health`."""
    return run_verb("health", VERBS, __name__, argv)
