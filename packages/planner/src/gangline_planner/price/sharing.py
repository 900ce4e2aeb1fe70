"""Ranks that share cores: while some wait, ranks that compute get their cores, up to `node.alone` times the speed.

The rates of a cluster file are those of a rank while all ranks of its node compute; if each has an accelerator of its
own, it never gets more than that. Only cores of one node can be shared, and only computation uses cores: the time on
links is equal however many ranks wait.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from gangline.explain.explained import StepAction
from gangline.explain.topology import Topology
from gangline_basics.cluster.file import Cluster
from gangline_basics.explain.timeline import StepTimeline


@dataclass(frozen=True)
class Cores:
    """Cores of nodes that ranks share.

    alone  maximum speed of a rank, while all others of its node wait, as a multiple of its usual speed
    ranks  number of ranks that a node has room for
    each   number of ranks in one pipeline rank; pp is the outermost axis, so they are neighbours
    """

    alone: float
    ranks: int
    each: int
    pipeline: int

    @classmethod
    def of(cls, cluster: Cluster, topology: Topology, world: int, pipeline: int) -> Cores:
        """Return the cores of a cluster's nodes; `pipeline` is the number of pipeline ranks."""
        return cls(max(1.0, cluster.get("node.alone") or 1.0), topology.gpus_per_node, world // pipeline, pipeline)

    @cached_property
    def nodes(self) -> tuple[dict[int, int], ...]:
        """Number of ranks on each node, for each pipeline rank."""
        nodes = []
        for rank in range(self.pipeline):
            first, end = rank * self.each, (rank + 1) * self.each
            touched = range(first // self.ranks, -(-end // self.ranks))
            nodes.append({node: min(end, (node + 1) * self.ranks) - max(first, node * self.ranks) for node in touched})
        return tuple(nodes)

    def compute_speeds(self, computing: Iterable[int]) -> dict[int, float]:
        """Return the speed of each pipeline rank in `computing`, on its fullest node, over the cluster file's rates."""
        crowds: Counter[int] = Counter()
        computing = tuple(computing)
        for rank in computing:
            crowds.update(self.nodes[rank])
        return {
            rank: min(self.alone, max(1.0, self.ranks / max(crowds[node] for node in self.nodes[rank])))
            for rank in computing
        }

    @cached_property
    def most(self) -> float:
        """Highest speed at which any pipeline rank ever computes."""
        if self.alone == 1.0:
            return 1.0
        return max(self.compute_speeds([rank])[rank] for rank in range(self.pipeline))


def share_cores(
    timeline: StepTimeline, cores: Cores, computing: Callable[[StepAction], float], hop: float = 0.0
) -> StepTimeline:
    """Return the timeline with every moment as early as idle cores allow.

    computing  returns the share of an action that is computation
    hop        seconds in which a result goes to the next stage, which no core makes shorter

    Between two moments at which a rank begins or ends, time passes as fast as for the slowest busy rank.
    """
    if cores.most == 1.0:
        return timeline
    changes: list[tuple[float, bool, int, float]] = []  # (moment, whether it begins, pipeline rank, busy share)
    for rank, spans in enumerate(timeline.spans):
        free = 0.0
        for action, start, end in spans:
            departure = max(free, start - hop)  # the awaited result is under way at the end of the wait
            for begin, over, part in ((departure, start, 0.0), (start, end, computing(action))):
                if over > begin:
                    changes += [(begin, True, rank, part), (over, False, rank, part)]
            free = end
    busy: dict[int, float] = {}
    moments, seconds = [0.0], [0.0]
    for moment, begins, rank, part in sorted(changes):
        if moment > moments[-1]:
            seconds.append(seconds[-1] + (moment - moments[-1]) * _compute_pace(busy, cores))
            moments.append(moment)
        if begins:
            busy[rank] = part
        else:
            del busy[rank]

    def shift_moment(moment: float) -> float:
        return seconds[bisect_right(moments, moment) - 1]

    return StepTimeline(
        tuple(
            tuple((action, shift_moment(start), shift_moment(end)) for action, start, end in s) for s in timeline.spans
        )
    )


def _compute_pace(busy: dict[int, float], cores: Cores) -> float:
    """Return the seconds that a second of the timeline takes, at most 1."""
    speeds = cores.compute_speeds(rank for rank, part in busy.items() if part)
    return max((1 - part + part / speeds.get(rank, 1.0) for rank, part in busy.items()), default=1.0)
