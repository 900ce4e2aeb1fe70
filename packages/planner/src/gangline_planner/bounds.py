"""Lower bounds on the step time of layouts, so that a search can skip most layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count

from gangline.config import LayoutBounds, ParallelConfig, Run
from gangline.explain.explained import When
from gangline.mesh import Mesh
from gangline.model.flops import count_flops_per_token
from gangline.model.tree import Node
from gangline.plan import Plan
from gangline_basics.cluster.file import Cluster
from gangline_planner.alternatives import LaidOut, lay_out_alternatives, list_overrides
from gangline_planner.assumed import Planned, get_kernels
from gangline_planner.price.matmuls import Rates
from gangline_planner.price.sharing import Cores
from gangline_planner.price.step import StageTime, compute_jitter
from gangline_planner.price.transfers import compute_transfer_seconds

SPLIT = 0.9  # factor on pipeline-fill times and exposed transfers, whose formulas assume equal stages


@dataclass(frozen=True)
class Alternative:
    """Layout that the overrides leave unset, with its bounds.

    least   lower bound on the step time, in seconds
    floor   lower bound on the step time, in seconds, that also holds for this layout with more recomputation. It leaves
            out transfers that may overlap with computation, because recomputation may hide them
    bytes   lower bound on the memory of the fullest rank, in bytes
    """

    least: float
    floor: float
    bytes: int
    first: Run  # run as the overrides specify it
    case: Planned  # plan input with the model of this layout
    base: Run
    parallel: ParallelConfig

    @property
    def run(self) -> Run:
        """Complete run with this layout."""
        return replace(self.base, parallel=self.parallel)

    @property
    def words(self) -> tuple[str, ...]:
        """Overrides to add to the command for this layout."""
        return list_overrides(self.first, self.run)


def sort_by_bound(case: Planned, cluster: Cluster) -> list[Alternative]:
    """Return all alternatives, sorted by their lower bound on the step time."""
    seconds = LeastSeconds(case, cluster)
    every = (laid_out for same in lay_out_alternatives(case) for laid_out in same)
    return sorted(
        (one for laid_out in every if (one := seconds.bound_alternative(laid_out))), key=lambda one: one.least
    )


def iterate_by_bound(case: Planned, cluster: Cluster) -> Iterator[Alternative]:
    """Yield all alternatives, sorted by their lower bound on the step time.

    With more recomputation, the bound of a layout is at least `floor` of the same layout with least recomputation.
    Therefore it is computed only when the yielded bounds reach this `floor`.
    """
    seconds, number = LeastSeconds(case, cluster), count()
    waiting: list[tuple[float, int, Alternative | list[tuple[int, LaidOut]]]] = []
    for first, *others in lay_out_alternatives(case):
        place, one = next(number), seconds.bound_alternative(first)
        if one:
            waiting.append((one.least, place, one))
        if numbered := [(next(number), other) for other in others]:
            waiting.append((one.floor if one else 0.0, numbered[0][0], numbered))
    heapify(waiting)
    while waiting:
        _, _, entry = heappop(waiting)
        if isinstance(entry, Alternative):
            yield entry
            continue
        for place, laid_out in entry:
            if one := seconds.bound_alternative(laid_out):
                heappush(waiting, (one.least, place, one))


class LeastSeconds:
    """Calculator of lower bounds on the step time of layouts; it caches the time of work that layouts share."""

    def __init__(self, case: Planned, cluster: Cluster) -> None:
        self.case, self.cluster = case, cluster
        # caches by the `id` of `LayoutBounds.work` or `.beside`; the stored bounds keep these objects alive
        self._known: dict[int, tuple[LayoutBounds, StageTime, float]] = {}
        self._sent: dict[int, tuple[LayoutBounds, list[tuple[When, float]]]] = {}

    def bound_alternative(self, laid_out: LaidOut) -> Alternative | None:
        """Return the layout with its lower bounds; None if the layout is impossible."""
        case, run, parallel, mesh = laid_out
        bounds = parallel.compute_bounds(run, mesh, case.model, self.cluster.topology)
        if bounds is None:
            return None
        alone = Cores.of(self.cluster, self.cluster.topology, self.case.world, mesh.size("pp")).most
        floor, least = (
            plain / alone + compute_jitter(plain / alone, self.case.world, self.cluster)
            for plain in self._bound_without_jitter(run, mesh, bounds, case.model)
        )
        return Alternative(least, floor, bounds.bytes, self.case.run, case, run, parallel)

    def _bound_without_jitter(
        self, run: Run, mesh: Mesh, bounds: LayoutBounds, model: tuple[Node, Plan]
    ) -> tuple[float, float]:
        """Return (bound without transfers that may overlap, bound with them): step time in seconds, without jitter."""
        if bounds.work is None:
            work = self._bound_by_peak(run, mesh, model) / (1 - bounds.idle)
            return work, work
        if id(bounds.work) not in self._known:
            kernels = get_kernels(run)
            rates = Rates.of(self.cluster, run.precision.get_matmul_format(), kernels)
            time = StageTime.of(bounds.work, self.cluster, rates, kernels)
            waits = sum(compute_transfer_seconds(transfer, self.cluster) for transfer in bounds.transfers)
            self._known[id(bounds.work)] = (bounds, time, waits)
        _, time, waits = self._known[id(bounds.work)]
        m, ranks = bounds.microbatches, mesh.size("pp")
        busy = (time.all + waits) * m / ranks
        # the gradient of the last microbatch reaches the first stage after the last stage has run all microbatches
        back = time.all - time.weights if bounds.splits_backward else time.all
        chain = (back + waits) * (1 + (m - 1) / bounds.stages)
        first = time.forward * (ranks - 1) / bounds.stages  # seconds until the last pipeline rank begins
        least = max(busy / (1 - bounds.idle), busy + SPLIT * first, SPLIT * chain) + self.cluster["host.seconds"]
        return least, least + (SPLIT * self._bound_exposed_transfers(bounds, time, ranks) if bounds.beside else 0.0)

    def _bound_exposed_transfers(self, bounds: LayoutBounds, time: StageTime, ranks: int) -> float:
        """Return a lower bound on the seconds of exposed transfers; `measure_exposed` never counts fewer."""
        forward, backward, m = time.forward / ranks, (time.all - time.forward) / ranks, bounds.microbatches
        turn = min(m, ranks) if bounds.stages > ranks else 1
        room = {"F": forward * m, "B": backward * m, "end": backward * turn, "update": forward * turn}
        if id(bounds.beside) not in self._sent:
            priced = [(transfer.when, compute_transfer_seconds(transfer, self.cluster)) for transfer in bounds.beside]
            self._sent[id(bounds.beside)] = (bounds, priced)
        share, total = self.cluster["overlap.share"], 0.0
        for when, seconds in self._sent[id(bounds.beside)][1]:
            total += seconds - min(room[when], share * seconds)
        return total

    def _bound_by_peak(self, run: Run, mesh: Mesh, model: tuple[Node, Plan]) -> float:
        rates, length = Rates.of(self.cluster, run.precision.get_matmul_format()), run.batch.sequence_length
        work = count_flops_per_token(model[0], length, model[1]) * length * run.batch.global_size
        # `work` has the FLOPs of full attention; causal kernels skip half of them, so their rate counts twice
        return work / mesh.world / max(rates.narrow, rates.wide, rates.attention * 2)
