"""The layout that is planned: the one that the words make, or where that cannot be, the best that they leave open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from gangline.cluster import Cluster
from gangline.config import ParallelConfig, Recompute, Run
from gangline.model import flops_per_token, parameter_count
from gangline.strategy import Mesh
from gangline_planner.assumed import Planned, explain, refused
from gangline_planner.forecast import Forecast, forecast
from gangline_planner.price.products import Rates

AGAIN = 1.25  # of the operations, at least, where blocks are computed again: a third of them less the head's


def chosen(case: Planned, cluster: Cluster, tokens: float | None) -> tuple[Forecast, tuple[str, ...]]:
    """(its plan, the words that were assumed or chosen). Raises UserError where no layout can be."""
    problem = refused(case.run)
    plan = None if problem else forecast(explain(case, case.run, cluster), cluster, tokens)
    if plan is not None and plan.fits:
        return plan, case.assumed
    best: Forecast | None = None
    words: tuple[str, ...] = ()
    for bound, run, changed in bounded(case, cluster):
        if best is not None and bound >= best.step.seconds:
            break  # all that follow are slower than this one at their best
        try:
            other = forecast(explain(case, run, cluster), cluster, tokens)
        except ValueError:  # what a layout says that does not divide; `refused` takes longer, and is asked of the best
            continue
        better = other.fits and (best is None or other.step.seconds < best.step.seconds)
        if better and refused(run) is None:
            best, words = other, changed
    if best is not None:
        return best, (*case.assumed, *words)
    if plan is not None:
        return plan, case.assumed
    assert problem is not None
    raise problem


def bounded(case: Planned, cluster: Cluster) -> list[tuple[float, Run, tuple[str, ...]]]:
    """(seconds that a step takes at least, run, words) of the alternatives that may fit, the fastest bound first."""
    tree, plan = case.model
    sequence = case.run.batch.sequence_length
    work = flops_per_token(tree, sequence, plan) * sequence * case.run.batch.global_size
    rates = Rates.of(cluster, case.run.precision.products())
    least = work / case.world / max(rates.narrow, rates.wide, rates.attention * 2)  # attention is counted uncut
    numbers, found = parameter_count(tree), []
    for run, words in alternatives(case):
        bounds = run.parallel.bounds(run, Mesh.of(run.parallel.axes(case.world)), numbers)
        if bounds.bytes <= cluster["memory.bytes"]:
            again = AGAIN if run.run.recompute is Recompute.full else 1.0
            found.append((least * again / (1 - bounds.idle), run, words))
    return sorted(found, key=lambda one: one[0])


def alternatives(case: Planned) -> Iterator[tuple[Run, tuple[str, ...]]]:
    """Runs with another layout, and with recomputation where the words do not say, each with the words that make it."""
    run = case.run
    open_recompute = not any(word.startswith("run.recompute=") for word in case.words)
    choices = (Recompute.none, Recompute.full) if open_recompute else (run.run.recompute,)
    typed = {word.lstrip("+").partition("=")[0] for word in case.words}
    for parallel in run.parallel.layouts(run, case.world):
        if any(word.partition("=")[0] in typed for word in changes(run.parallel, parallel)):
            continue  # what was typed stays
        for recompute in choices:
            other = replace(run, parallel=parallel, run=replace(run.run, recompute=recompute))
            words = changes(run.parallel, parallel)
            yield other, (*words, f"run.recompute={recompute.value}") if recompute != run.run.recompute else words


def changes(before: ParallelConfig, after: ParallelConfig) -> tuple[str, ...]:
    """What to type for `after`, options as `before` has them left out."""
    names = [item.name for item in fields(after) if getattr(before, item.name) != getattr(after, item.name)]
    return tuple(f"parallel.{name}={getattr(after, name)}" for name in names)
