"""Advice that leads on: of the changes that may mend a run, those with which it has fewer problems. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from itertools import islice
from typing import Any

from gangline.config.schema import Run
from gangline.config.serial import from_dict, to_dict
from gangline.config.values import spell
from gangline.errors import UserError

_asking: ContextVar[bool] = ContextVar("asking", default=False)


MOST_TRIED = 24  # a try checks the whole run, some 50 ms: what is not found among the nearest is not advised


def find_accepted(run: Run, candidates: Iterable[Mapping[str, Any]], most: int = 4) -> list[str]:
    """The first `most` changes that a run would take, each as the words that a user types.

    A change is path -> value. One is taken that has none but the run's own problems, and not all of them; while one is
    tried, the advice of its own problems is left out.
    """
    if _asking.get():
        return []
    token = _asking.set(True)
    try:
        before = _find_problems(run)
        changes: list[str] = []
        for change in islice(candidates, MOST_TRIED):
            if len(changes) < most and _find_problems(_change(run, change)) < before:
                changes.append(" ".join(f"{path}={spell(value)}" for path, value in change.items()))
        return changes
    finally:
        _asking.reset(token)


def suggest_nearest(run: Run, candidates: Iterable[Mapping[str, Any]], most: int = 4) -> str:
    """The same as a line of advice, or ""."""
    return "; or ".join(find_accepted(run, candidates, most))


def _change(run: Run, change: Mapping[str, Any]) -> Run:
    content = to_dict(run)
    for path, value in change.items():
        *way, last = path.split(".")
        place = content
        for step in way:
            place = place[step]
        place[last] = value
    return from_dict(content)


def _find_problems(run: Run) -> set[str]:
    from gangline.config.check import find_problems

    try:
        return {problem.what for problem in find_problems(run)}
    except UserError as error:
        return {error.what}
