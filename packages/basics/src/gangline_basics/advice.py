"""Advice for a configuration with problems: option changes that reduce the number of problems. Torch-free."""

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


MOST_TRIED = 24  # maximum number of candidates: checking the configuration of each takes about 50 ms


def find_accepted(run: Run, candidates: Iterable[Mapping[str, Any]], most: int = 4) -> list[str]:
    """Return the first `most` changes that reduce the problems of the run, each as overrides that a user can type.

    A change maps option paths to values. It is accepted if the problems of the changed run are a proper subset of the
    run's own. Only the first MOST_TRIED candidates are tried. A nested call, from the check of a candidate, returns [].
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
    """Return the changes of `find_accepted` as one line of advice, or "" if no change is accepted."""
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
