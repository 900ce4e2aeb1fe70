"""Choice of the layout to plan: that of the overrides, or if it is impossible or too large the best they leave open."""

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

NEAR = 0.05  # share of a step: smaller differences between plans are within their error


def choose_plan(case: Planned, cluster: Cluster, tokens: float | None) -> tuple[Forecast, tuple[str, ...]]:
    """Return (the plan, overrides that were assumed or chosen). Raises UserError if no layout is possible.

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
    """Pause the garbage collector within the context.

    Layouts have no reference cycles, and the search for cycles takes a fifth of the time: it visits all live objects
    again and again.
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
    """Return (plan of the fastest layout that fits, its overrides), of those left open; (None, ()) if none fits.

    within  share of its step time by which another layout may be faster, where finding that one would take long
    """
    best: Forecast | None = None
    words: tuple[str, ...] = ()
    for other in iterate_by_bound(case, cluster):
        if best is not None and other.least >= best.step.seconds / (1 + within):
            break  # the bound of each that follows is above this step time
        if other.bytes > cluster["memory.bytes"]:
            continue
        beaten = Beaten([best] if best is not None else [], limit=cluster["memory.bytes"])
        plan = plan_alternative(other, cluster, tokens, beaten)
        better = plan is not None and plan.fits and (best is None or plan.step.seconds < best.step.seconds)
        if better and check_run(other.run) is None:
            best, words = plan, other.words
    return best, words


class Beaten:
    """Test of whether a layout's lower bound, known before its timeline, is above the plans of other layouts.

    plans   plans to compare with
    memory  whether such a plan must take no more memory, too
    limit   bytes beyond which a layout is useless
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
    """Return the plan of an alternative; None if it does not divide, or is beaten.

    `check_run` is not called: it takes longer, so only the best alternative is checked.
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
    """Return the assumed overrides that were not chosen differently, and the chosen overrides."""
    names = {get_option_name(word) for word in words}
    return (*(word for word in case.assumed if get_option_name(word) not in names), *words)
