"""`gangline health`: what a run spent its time on, and what one would. Nothing here imports torch.

Each verb is a module that is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from gangline.cli.verbs import usage_of, verb_of

VERBS = {
    "report": "where every second of a run went, its faults, and the best that could be had",
    "burn-in": "measures every rank as training would use it; names the bad ones, writes a cluster file",
    "watch": "the page of a run that lives: loss, step, ranks, verdicts, the last checkpoint",
    "simulate": "what a job of N nodes over D days loses to failures",
}


def main(argv: Sequence[str]) -> int:
    """The verb `gangline health`."""
    asked = verb_of("health", VERBS, argv, usage_of("health", VERBS))
    return 0 if asked is None else int(import_module(f"{__name__}.{asked[0].replace('-', '_')}").run(asked[1]))
