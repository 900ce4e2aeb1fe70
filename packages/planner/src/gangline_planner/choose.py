"""The layout that is planned: the one that the words make, or where that cannot be, the best that they leave open."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf

from gangline.explain.explained import Explained
from gangline_basics.cluster.file import Cluster
from gangline_planner.alternatives import get_option_name
from gangline_planner.assumed import Planned, check_run, explain
from gangline_planner.bounds import Alternative, iterate_by_bound
from gangline_planner.forecast import Forecast, forecast
from gangline_planner.price.step import Pieces

NEAR = 0.05  # of a step: what one plan takes less than another is then within their error


def choose_plan(case: Planned, cluster: Cluster, tokens: float | None) -> tuple[Forecast, tuple[str, ...]]:
    """(its plan, the words that were assumed or chosen). Raises UserError where no layout can be.

    What is left open is chosen such that no layout is faster by more than `NEAR`; `search` finds the fastest.
    """
    problem = check_run(case.run)
    plan = None if problem else forecast(explain(case, case.run, cluster), cluster, tokens)
    if plan is not None and plan.fits:
        return plan, case.assumed
    best, words = find_fastest(case, cluster, tokens, NEAR)
    if best is not None:
        return best, merge_words(case, words)
    if plan is not None:
        return plan, case.assumed
    assert problem is not None
    raise problem


@contextmanager
def pause_gc() -> Iterator[None]:
    """Without the search for reference cycles: layouts have none, and it walks all that are alive again and again, a
    fifth of the time.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@pause_gc()
def find_fastest(
    case: Planned, cluster: Cluster, tokens: float | None = None, within: float = 0.0
) -> tuple[Forecast | None, tuple[str, ...]]:
    """(the plan of the fastest layout that fits and that the words leave open, its words); None: none does.

    within: a share of its step by which another may be faster, where looking for that would take long.
    """
    best: Forecast | None = None
    words: tuple[str, ...] = ()
    for other in iterate_by_bound(case, cluster):
        if best is not None and other.least >= best.step.seconds / (1 + within):
            break  # all that follow are slower than this one at their best
        if other.bytes > cluster["memory.bytes"]:
            continue
        beaten = Beaten([best] if best is not None else [], limit=cluster["memory.bytes"])
        plan = plan_alternative(other, cluster, tokens, beaten)
        better = plan is not None and plan.fits and (best is None or plan.step.seconds < best.step.seconds)
        if better and check_run(other.run) is None:
            best, words = plan, other.words
    return best, words


class Beaten:
    """Whether what a layout takes at least, known before its timeline, is more than others take.

    plans   those with which it is compared
    memory  whether one of them must take no more memory, too
    limit   bytes beyond which no layout is of use
    """

    def __init__(self, plans: Sequence[Forecast], memory: bool = False, limit: float = inf) -> None:
        self.plans, self.memory, self.limit = plans, memory, limit

    def __call__(self, explained: Explained, least: float) -> bool:
        rank_memory = explained.ranks[explained.fullest].memory
        if rank_memory > self.limit:
            return True
        return any(one.step.seconds <= least and (not self.memory or one.memory <= rank_memory) for one in self.plans)


def plan_alternative(
    other: Alternative, cluster: Cluster, tokens: float | None = None, beaten: Beaten | None = None
) -> Forecast | None:
    """The plan of an alternative. None: it does not divide, or is beaten. `check_run` takes longer, and is asked of the
    best alone.
    """
    try:
        explanation = explain(other.case, other.run, cluster)
        pieces = Pieces.of(explanation, cluster)
        if beaten is not None and beaten(explanation, pieces.compute_least_seconds(explanation, cluster)):
            return None
        return forecast(explanation, cluster, tokens, pieces)
    except ValueError:
        return None


def merge_words(case: Planned, words: Sequence[str]) -> tuple[str, ...]:
    """What was assumed, in so far as it was not chosen otherwise, and what was chosen."""
    names = {get_option_name(word) for word in words}
    return (*(word for word in case.assumed if get_option_name(word) not in names), *words)
