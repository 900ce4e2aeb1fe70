"""Command `gangline health`: reports, live status, burn-in and failure simulation. Does not import torch.

Each subcommand is a module of this package, imported when the subcommand is called.
"""

from __future__ import annotations

from collections.abc import Sequence

from gangline.cli.verbs import run_verb

VERBS = {
    "report": "print the time ledger of a run: seconds by kind, faults, ETTR and its optimum",
    "burn-in": "measure every rank of a job, report bad ranks, and write a cluster file",
    "watch": "show the live status of a run: loss, step, ranks, verdicts, the last checkpoint",
    "simulate": "simulate the time that a job of N nodes loses to failures in D days",
}


def main(argv: Sequence[str]) -> int:
    """Run the command `gangline health`."""
    return run_verb("health", VERBS, __name__, argv)
