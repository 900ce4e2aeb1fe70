"""Command `gangline plan search`: lists the fastest layouts that the overrides allow, and layouts that do not fit."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import TYPE_CHECKING, Any

from gangline import UserError
from gangline_basics.cluster.file import Cluster, list_shipped
from gangline_planner.accuracy import describe_expected_error
from gangline_planner.alternatives import get_option_name
from gangline_planner.assumed import Planned, check_run
from gangline_planner.bounds import Alternative, sort_by_bound
from gangline_planner.choose import BoundFilter, merge_words, pause_gc, plan_alternative
from gangline_planner.forecast import Forecast
from gangline_planner.page import format_unknown_costs
from gangline_planner.pictures.terminal import draw_points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 10  # maximum number of layouts in a list
DRAWN = 1.2  # maximum step time to draw, as a multiple of the slowest step time of the Pareto front
# options that change the memory of a rank: if the user leaves them unset, the search tries other values
ROOM = (
    *(f"parallel.{name}" for name in ("tp", "pp", "cp", "dp_shard", "dp_replicate", "zero", "schedule", "chunks")),
    "batch.micro_size",
    "run.recompute",
)
AXES = ("step time in seconds", "memory of the fullest rank in GB")


@dataclass(frozen=True)
class Candidate:
    """Layout with its plan. words: overrides to add to the overrides of the user for this layout."""

    plan: Forecast
    words: tuple[str, ...]

    @property
    def lacks(self) -> float:
        """Bytes by which the fullest rank exceeds the memory of an accelerator; 0 if the layout fits."""
        return max(0.0, self.plan.memory - self.plan.cluster["memory.bytes"])

    def to_dict(self) -> dict[str, Any]:
        return {**self.plan.to_dict(), "words": list(self.words), "lacks_bytes": self.lacks}


@dataclass(frozen=True)
class SearchResult:
    """Result of a search for layouts.

    fit     layouts that fit, fastest first
    large   layouts that do not fit, least missing memory first
    every   all layouts that fit and were planned; only layouts in `fit` are checked by `check_run`
    others  number of further layouts, which were not planned because they cannot be faster than `fit`
    """

    fit: tuple[Candidate, ...]
    large: tuple[Candidate, ...]
    every: tuple[Candidate, ...]
    others: int

    @property
    def drawn(self) -> list[Candidate]:
        """Layouts of `every` to draw: not much slower than the fastest layout and the Pareto front."""
        slowest = max((one.plan.step.seconds for one in (*self.fit[:1], *self.pareto)), default=0.0)
        return [one for one in self.every if one.plan.step.seconds <= DRAWN * slowest]

    @property
    def pareto(self) -> list[Candidate]:
        """Pareto front of `every` by step time and memory, fastest layout first."""
        front: list[Candidate] = []
        for one in sorted(self.every, key=lambda one: (one.plan.step.seconds, one.plan.memory)):
            if not front or one.plan.memory < front[-1].plan.memory:
                front.append(one)
        return front


@pause_gc()
def search(case: Planned, cluster: Cluster, shown: int = SHOWN) -> SearchResult:
    """Return at most `shown` layouts that fit, all checked by `check_run`, and at most `shown` layouts that do not fit.

    Alternatives are planned in the order of their lower bound on the step time, so that the search can stop early.
    Raises UserError if no layout is possible.
    """
    fit: list[Candidate] = []
    large: list[Candidate] = []
    crowded: list[Alternative] = []  # alternatives whose lower bound on memory does not fit
    alternatives, looked = sort_by_bound(case, cluster), 0
    for other in alternatives:
        if len(fit) >= shown and other.least >= fit[shown - 1].plan.step.seconds:
            break
        looked += 1
        if other.bytes > cluster["memory.bytes"]:
            crowded.append(other)
            continue
        bound_filter = BoundFilter([one.plan for one in fit], memory=True) if len(fit) >= shown else None
        plan = plan_alternative(other, cluster, bound_filter=bound_filter)
        if plan is None:
            continue
        candidate = Candidate(plan, other.words)
        if candidate.lacks:
            large.append(candidate)
        else:
            place = bisect(fit, plan.step.seconds, key=lambda one: one.plan.step.seconds)
            if place >= shown or check_run(other.run) is None:  # check_run is slow: only the fastest are checked
                fit.insert(place, candidate)
    for other in nsmallest(shown, crowded, key=lambda other: other.bytes):
        plan = plan_alternative(other, cluster)
        if plan is not None and not plan.fits:
            large.append(Candidate(plan, other.words))
    if not fit and not large and (problem := check_run(case.run)) is not None:
        raise problem
    least = nsmallest(shown, large, key=lambda one: one.lacks)
    return SearchResult(tuple(fit[:shown]), tuple(least), tuple(fit), len(alternatives) - looked)


def explain_misfit(found: SearchResult, words: Sequence[str], case: Planned) -> UserError:
    """Return an error that no layout fits: it names the layout that lacks least memory, and how to reduce memory."""
    what, more = "no layout that the overrides allow fits into memory.", f"launch.processes={2 * case.world}"
    if not found.large:
        return UserError(
            what, "No layout divides the model and the batch.", f"Use another number of ranks, such as  {more}"
        )
    least = found.large[0]
    explanation = least.plan.explained
    kinds = explanation.ranks[explanation.fullest].bytes
    most = max(kinds, key=lambda kind: kinds[kind])
    constraints = [word for word in words if get_option_name(word) in ROOM]
    cuts = hasattr(case.run.parallel, "tp")
    return UserError(
        what,
        f"Closest to fitting  {' '.join(least.words) or 'the layout of the overrides'}: {least.lacks / 1e9:.3g} GB "
        f"over the limit; its fullest rank uses most memory for {most}, {kinds[most] / 1e9:.3g} GB.",
        f"Leave these options unset:  {' '.join(constraints)}" if constraints else "",
        f"{'Use more ranks' if cuts else 'Use more ranks and a strategy that shards the model'}, such as  "
        f"{more}{'' if cuts else ' parallel=3d'}; or shorter sequences.",
    )


def draw_layouts(found: SearchResult, cluster: Cluster) -> Figure:
    """Return a figure of step time against memory of the layouts that fit."""
    from gangline_planner.pictures.front import draw_front

    every, front = ([(*get_point(one), " ".join(one.words)) for one in group] for group in (found.drawn, found.pareto))
    return draw_front(f"Layouts on {cluster.name}", every, front, cluster["memory.bytes"] / 1e9)


def get_point(one: Candidate) -> tuple[float, float]:
    """Return (seconds of a step, gigabytes of the fullest rank) of a layout."""
    return one.plan.step.seconds, one.plan.memory / 1e9


def format_search(found: SearchResult, words: Sequence[str], case: Planned) -> str:
    """Return the text report of a search; the row of each layout has its `train` command."""
    lines = [f"assumed: {' '.join(case.assumed)}"] if case.assumed else []
    lines += [line for one in (*found.fit, *found.large)[:1] for line in format_unknown_costs(one.plan)]
    lines += [f"{'s/step':>9} {'MFU':>6} {'GB':>7}"] if found.fit else ["no layout fits"]
    for one in found.fit:
        overrides = " ".join([*words, *merge_words(case, one.words)])
        lines.append(
            f"{one.plan.step.seconds:9.4g} {one.plan.mfu:6.1%} {one.plan.memory / 1e9:7.1f}  train {overrides}"
        )
    if found.fit and found.fit[0].plan.cluster.name in list_shipped():
        lines.append(describe_expected_error())
    if found.others:
        lines.append(f"{found.others} more layouts were not planned: by their lower bounds, they cannot be faster")
    if len(found.drawn) > 1:
        lines += [
            "",
            draw_points([get_point(one) for one in found.drawn], [get_point(one) for one in found.pareto], AXES),
        ]
    if found.large:
        lines.append("layouts that do not fit, by missing memory")
        lines += [f"{one.lacks / 1e9:8.1f} GB  {' '.join(one.words)}" for one in found.large]
    return "\n".join(lines)
