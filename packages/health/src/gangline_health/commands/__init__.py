"""`gangline health`: what a run spent its time on, and what one would. Nothing here imports torch.

Each verb is a module that is imported when it is asked for.
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
    """The verb `gangline health`."""
    return run_verb("health", VERBS, __name__, argv)
