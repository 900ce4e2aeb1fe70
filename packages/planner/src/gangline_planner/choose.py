"""The layout that is planned: the one that the words make, or where that cannot be, the best that they leave open."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from math import inf

from gangline.cluster import Cluster
from gangline.config import LayoutBounds, ParallelConfig, PartConfig, Recompute, Run
from gangline.explain import Explained
from gangline.model import Node, Plan, compose_model, flops_per_token
from gangline.strategy import AXES, DATA_AXES, Mesh
from gangline_planner.assumed import Planned, explain, kernels_of, refused
from gangline_planner.forecast import Forecast, forecast
from gangline_planner.price.products import Rates
from gangline_planner.price.sharing import Cores
from gangline_planner.price.step import Pieces, StageTime, jitter_of
from gangline_planner.price.transfers import transfer_seconds

NEAR = 0.05  # of a step: what one plan takes less than another is then within their error
SPLIT = 0.9  # of the way through a pipeline: stages are not all as long
LARGEST = 8  # sequences of a microbatch that are tried where the words leave them open


@dataclass(frozen=True)
class Alternative:
    """A layout that the words leave open. least: seconds that its step takes at least; bytes: of its fullest rank."""

    least: float
    bytes: int
    first: Run  # that of the words
    case: Planned  # whose model it has
    base: Run
    parallel: ParallelConfig

    @property
    def run(self) -> Run:
        """The run that has it."""
        return replace(self.base, parallel=self.parallel)

    @property
    def words(self) -> tuple[str, ...]:
        """What to type for it."""
        return words_of(self.first, self.run)


def chosen(case: Planned, cluster: Cluster, tokens: float | None) -> tuple[Forecast, tuple[str, ...]]:
    """(its plan, the words that were assumed or chosen). Raises UserError where no layout can be.

    What is left open is chosen such that no layout is faster by more than `NEAR`; `search` finds the fastest.
    """
    problem = refused(case.run)
    plan = None if problem else forecast(explain(case, case.run, cluster), cluster, tokens)
    if plan is not None and plan.fits:
        return plan, case.assumed
    best, words = fastest(case, cluster, tokens, NEAR)
    if best is not None:
        return best, all_words(case, words)
    if plan is not None:
        return plan, case.assumed
    assert problem is not None
    raise problem


@contextmanager
def uncollected() -> Iterator[None]:
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


@uncollected()
def fastest(
    case: Planned, cluster: Cluster, tokens: float | None = None, within: float = 0.0
) -> tuple[Forecast | None, tuple[str, ...]]:
    """(the plan of the fastest layout that fits and that the words leave open, its words); None: none does.

    within: a share of its step by which another may be faster, where looking for that would take long.
    """
    best: Forecast | None = None
    words: tuple[str, ...] = ()
    for other in bounded(case, cluster):
        if best is not None and other.least >= best.step.seconds / (1 + within):
            break  # all that follow are slower than this one at their best
        if other.bytes > cluster["memory.bytes"]:
            continue
        beaten = Beaten([best] if best is not None else [], limit=cluster["memory.bytes"])
        found = planned_as(other, cluster, tokens, beaten)
        better = found is not None and found.fits and (best is None or found.step.seconds < best.step.seconds)
        if better and refused(other.run) is None:
            best, words = found, other.words
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
        held = explained.ranks[explained.fullest].memory
        if held > self.limit:
            return True
        return any(one.step.seconds <= least and (not self.memory or one.memory <= held) for one in self.plans)


def planned_as(
    other: Alternative, cluster: Cluster, tokens: float | None = None, beaten: Beaten | None = None
) -> Forecast | None:
    """The plan of an alternative. None: it does not divide, or is beaten. `refused` takes longer, and is asked of the
    best alone.
    """
    try:
        explained = explain(other.case, other.run, cluster)
        pieces = Pieces.of(explained, cluster)
        if beaten is not None and beaten(explained, pieces.least(explained, cluster)):
            return None
        return forecast(explained, cluster, tokens, pieces)
    except ValueError:
        return None


def all_words(case: Planned, words: Sequence[str]) -> tuple[str, ...]:
    """What was assumed, in so far as it was not chosen otherwise, and what was chosen."""
    names = {name_of(word) for word in words}
    return (*(word for word in case.assumed if name_of(word) not in names), *words)


def bounded(case: Planned, cluster: Cluster) -> list[Alternative]:
    """The alternatives, the fastest bound first."""
    found, seconds, world = [], LeastSeconds(cluster), case.world
    for one, run, parallel in alternatives(case):
        mesh = mesh_of(parallel, world)
        share, rest = divmod(run.batch.global_size, mesh.size(*DATA_AXES))
        if rest or share % (run.batch.micro_size or 1):
            continue
        bounds = parallel.bounds(run, mesh, one.model, cluster.topology)
        if bounds is not None:
            least = seconds.least(run, mesh, bounds, one.model)
            found.append(Alternative(least, bounds.bytes, case.run, one, run, parallel))
    return sorted(found, key=lambda one: one.least)


def mesh_of(parallel: ParallelConfig, world: int) -> Mesh:
    """The layout's mesh; read off where all axes are named."""
    sizes = tuple((axis, getattr(parallel, axis, None)) for axis in AXES)
    named = all(size is not None for _, size in sizes)
    return _same(sizes if named else tuple(parallel.axes(world).items()))


@cache
def _same(sizes: tuple[tuple[str, int], ...]) -> Mesh:
    """One object for all layouts of these sizes."""
    return Mesh.of(dict(sizes))


class LeastSeconds:
    """Seconds that a step takes at least; prices what layouts share once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._known: dict[
            int, tuple[LayoutBounds, StageTime, float]
        ] = {}  # by the identity of `work`, which is kept alive

    def least(self, run: Run, mesh: Mesh, bounds: LayoutBounds, model: tuple[Node, Plan]) -> float:
        cores = Cores.of(self.cluster, self.cluster.topology, mesh.world, mesh.size("pp"))
        plain = self._plain(run, mesh, bounds, model) / cores.most
        return plain + jitter_of(plain, mesh.world, self.cluster)

    def _plain(self, run: Run, mesh: Mesh, bounds: LayoutBounds, model: tuple[Node, Plan]) -> float:
        """Without jitter."""
        if bounds.work is None:
            return self._by_peak(run, mesh, model) / (1 - bounds.idle)
        if id(bounds.work) not in self._known:
            kernels = kernels_of(run)
            rates = Rates.of(self.cluster, run.precision.products(), kernels)
            time = StageTime.of(bounds.work, self.cluster, rates, kernels)
            waits = sum(transfer_seconds(sent, self.cluster) for sent in bounds.transfers)
            self._known[id(bounds.work)] = (bounds, time, waits)
        _, time, waits = self._known[id(bounds.work)]
        m, ranks = bounds.microbatches, mesh.size("pp")
        busy = (time.all + waits) * m / ranks
        # the last microbatch's gradient comes back to the first stage after all of them have been at the last one
        back = time.all - time.weights if bounds.splits_backward else time.all
        chain = (back + waits) * (1 + (m - 1) / bounds.stages)
        first = time.forward * (ranks - 1) / bounds.stages  # until the last rank begins
        least = max(busy / (1 - bounds.idle), busy + SPLIT * first, SPLIT * chain) + self.cluster["host.seconds"]
        return least + (SPLIT * self._bare(bounds, time, ranks) if bounds.beside else 0.0)

    def _bare(self, bounds: LayoutBounds, time: StageTime, ranks: int) -> float:
        """Seconds of transfers that no computation beside them can hide: `price.step.exposed` hides no more of any."""
        forward, backward, m = time.forward / ranks, (time.all - time.forward) / ranks, bounds.microbatches
        turn = min(m, ranks) if bounds.stages > ranks else 1
        room = {"F": forward * m, "B": backward * m, "end": backward * turn, "update": forward * turn}
        found = 0.0
        for sent in bounds.beside:
            seconds = transfer_seconds(sent, self.cluster)
            found += seconds - min(room[sent.when], self.cluster["overlap.share"] * seconds)
        return found

    def _by_peak(self, run: Run, mesh: Mesh, model: tuple[Node, Plan]) -> float:
        rates, length = Rates.of(self.cluster, run.precision.products()), run.batch.sequence_length
        work = flops_per_token(model[0], length, model[1]) * length * run.batch.global_size
        return work / mesh.world / max(rates.narrow, rates.wide, rates.attention * 2)  # counted uncut


def alternatives(case: Planned) -> Iterator[tuple[Planned, Run, ParallelConfig]]:
    """(the case whose model it has, a run with other microbatches and recomputation, its layout) where the words leave
    them open, and other sizes of folds. What was typed stays.
    """
    run = case.run
    typed = {name_of(word) for word in case.words}
    fixed = [name for name in (item.name for item in fields(run.parallel)) if f"parallel.{name}" in typed]
    again = (run.run.recompute,) if "run.recompute" in typed else tuple(Recompute)
    for edited in _edited(case, typed):
        bases = [
            replace(
                edited.run,
                batch=replace(run.batch, micro_size=micro),
                run=replace(run.run, recompute=recompute),
            )
            for micro, recompute in product(_micro_sizes(run, typed), again)
        ]
        for parallel in edited.run.parallel.layouts(edited.run, case.world):
            if all(getattr(parallel, name) == getattr(run.parallel, name) for name in fixed):
                yield from ((edited, base, parallel) for base in bases)


def _edited(case: Planned, typed: set[str]) -> Iterator[Planned]:
    """The case, and those whose edits share the model otherwise."""
    groups = list(case.run.edits)
    for options in product(*(config.layouts(case.run, case.world) for config in case.run.edits.values())):
        edits = dict(zip(groups, options, strict=True))
        names = {f"{group}.{name}" for group in groups for name in changed(case.run.edits[group], edits[group])}
        if not names:
            yield case
        elif typed.isdisjoint(names):
            run = replace(case.run, edits=edits)
            yield replace(case, run=run, model=compose_model(run))


def _micro_sizes(run: Run, typed: set[str]) -> list[int | None]:
    if "batch.micro_size" in typed:
        return [run.batch.micro_size]
    size = run.batch.global_size
    powers = [2**power for power in range(LARGEST.bit_length()) if size % 2**power == 0]
    return list(dict.fromkeys((run.batch.micro_size, *powers)))


def changed(before: PartConfig, after: PartConfig) -> list[str]:
    """Names of the options that differ."""
    if before is after:
        return []
    return [item.name for item in fields(after) if getattr(before, item.name) != getattr(after, item.name)]


def words_of(before: Run, after: Run) -> tuple[str, ...]:
    """What to type for `after` beside the words of `before`."""
    found = [f"parallel.{name}={getattr(after.parallel, name)}" for name in changed(before.parallel, after.parallel)]
    for group, edit in after.edits.items():
        found += [f"{group}.{name}={getattr(edit, name)}" for name in changed(before.edits[group], edit)]
    if after.batch.micro_size != before.batch.micro_size:
        found.append(f"batch.micro_size={after.batch.micro_size}")
    if after.run.recompute != before.run.recompute:
        found.append(f"run.recompute={after.run.recompute.value}")
    return tuple(found)


def name_of(word: str) -> str:
    """The option that a word is about."""
    return word.lstrip("+").partition("=")[0]
