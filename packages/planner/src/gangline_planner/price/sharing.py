"""Ranks that share CPU cores: computing ranks use the cores of waiting ranks, and run up to `node.alone` times as fast.

The rates in a cluster file are those of a rank while all ranks of its node compute. A rank with its own accelerator
never gets faster than that. Only ranks of one node share cores, and only computation uses cores: the time of transfers
does not depend on how many ranks wait.
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
    """CPU cores of nodes, which the ranks of a node share.

    alone     speed of a rank while all other ranks of its node wait, as a multiple of its speed while all compute
    ranks     number of ranks per node
    each      number of ranks in one pipeline rank; pp is the outermost axis, so these ranks are consecutive
    pipeline  number of pipeline ranks
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
        """For each pipeline rank: node -> number of its ranks on that node."""
        nodes = []
        for rank in range(self.pipeline):
            first, end = rank * self.each, (rank + 1) * self.each
            touched = range(first // self.ranks, -(-end // self.ranks))
            nodes.append({node: min(end, (node + 1) * self.ranks) - max(first, node * self.ranks) for node in touched})
        return tuple(nodes)

    def compute_speeds(self, computing: Iterable[int]) -> dict[int, float]:
        """Return the speed of each computing pipeline rank on its fullest node, relative to the cluster file."""
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
        """Maximum speed of any pipeline rank, while all other pipeline ranks wait."""
        if self.alone == 1.0:
            return 1.0
        return max(self.compute_speeds([rank])[rank] for rank in range(self.pipeline))


def share_cores(
    timeline: StepTimeline, cores: Cores, computing: Callable[[StepAction], float], hop: float = 0.0
) -> StepTimeline:
    """Return the timeline shortened by the use of idle cores.

    computing  returns the share of an action that is computation
    hop        seconds to send a result to the next stage, which idle cores do not shorten

    Between two moments at which an action begins or ends, all ranks are sped up by the factor of the slowest busy rank.
    """
    if cores.most == 1.0:
        return timeline
    changes: list[tuple[float, bool, int, float]] = []  # (moment, begins or ends, pipeline rank, computing share)
    for rank, spans in enumerate(timeline.spans):
        free = 0.0
        for action, start, end in spans:
            departure = max(free, start - hop)  # at the end of the wait, the awaited result is being sent
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
    """Return the seconds that a second of the original timeline takes, at most 1. busy: rank -> computing share."""
    speeds = cores.compute_speeds(rank for rank, part in busy.items() if part)
    return max((1 - part + part / speeds.get(rank, 1.0) for rank, part in busy.items()), default=1.0)
