"""Choice of the layout to plan: the layout of the overrides, or if it does not fit, the fastest that they allow."""

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

# tolerance for the fastest layout, as a share of the step time; smaller differences are within the prediction error
NEAR = 0.05


def choose_plan(case: Planned, cluster: Cluster, tokens: float | None) -> tuple[Forecast, tuple[str, ...]]:
    """Return (plan, overrides that were assumed or chosen). Raises UserError if no layout is possible.

    If the layout of the overrides does not fit, unset options are chosen such that no other layout that fits is faster
    by more than the share `NEAR` of the step time; `search` finds the fastest.
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

    Layouts have no reference cycles, and the collector takes a fifth of the time of a search, because it visits all
    live objects again and again.
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
    """Return (plan, overrides) of the fastest layout that fits and that the overrides allow; (None, ()) if none fits.

    within  tolerance of the search: share of the step time by which another layout may be faster than the result
    """
    best: Forecast | None = None
    words: tuple[str, ...] = ()
    for other in iterate_by_bound(case, cluster):
        if best is not None and other.least >= best.step.seconds / (1 + within):
            break  # the bounds of all further alternatives are above this step time
        if other.bytes > cluster["memory.bytes"]:
            continue
        bound_filter = BoundFilter([best] if best is not None else [], limit=cluster["memory.bytes"])
        plan = plan_alternative(other, cluster, tokens, bound_filter)
        better = plan is not None and plan.fits and (best is None or plan.step.seconds < best.step.seconds)
        if better and check_run(other.run) is None:
            best, words = plan, other.words
    return best, words


class BoundFilter:
    """Test that rejects layouts by a lower bound on their step time, before their timeline is computed.

    plans   a layout is rejected if one of these plans is at least as fast as the layout's lower bound
    memory  True: that plan must also take at most as much memory as the layout
    limit   memory limit: a layout is rejected if its fullest rank needs more bytes
    """

    def __init__(self, plans: Sequence[Forecast], memory: bool = False, limit: float = inf) -> None:
        self.plans, self.memory, self.limit = plans, memory, limit

    def __call__(self, explained: Explained, least: float) -> bool:
        rank_memory = explained.ranks[explained.fullest].memory
        if rank_memory > self.limit:
            return True
        return any(one.step.seconds <= least and (not self.memory or one.memory <= rank_memory) for one in self.plans)


def plan_alternative(
    other: Alternative, cluster: Cluster, tokens: float | None = None, bound_filter: BoundFilter | None = None
) -> Forecast | None:
    """Return the plan of an alternative; None if the layout does not divide the model, or if `bound_filter` rejects it.

    `check_run` is not called, because it takes longer: callers check only the best alternatives.
    """
    try:
        explanation = explain(other.case, other.run, cluster)
        pieces = Pieces.of(explanation, cluster)
        if bound_filter is not None and bound_filter(explanation, pieces.compute_least_seconds(explanation, cluster)):
            return None
        return forecast(explanation, cluster, tokens, pieces)
    except ValueError:
        return None


def merge_words(case: Planned, words: Sequence[str]) -> tuple[str, ...]:
    """Return the assumed overrides whose option is not in `words`, and then `words`, the chosen overrides."""
    names = {get_option_name(word) for word in words}
    return (*(word for word in case.assumed if get_option_name(word) not in names), *words)
