"""The network links of traffic: along mesh axes, inside a fold's groups, or between the replicas of a fold's shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from gangline.explain.explained import Operation, Transfer, When
from gangline.explain.topology import Tier
from gangline.mesh import Mesh
from gangline.plan import Fold
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.sharding.ranks import find_active_fold

BESIDE = "beside "  # prefix of a fold's name; means the ranks that hold the same shard of the fold


@dataclass(frozen=True)
class Sent:
    """The traffic of one rank along one axis, or over joint axes, in a step, for one purpose.

    axes         axes of the mesh, the name of a fold, or `BESIDE` + the name of a fold
    calls        number of collectives or messages in a step
    bytes        bytes that the rank sends in a step
    when, waits  as in `gangline.explain.explained.Transfer`
    """

    axes: tuple[str, ...]
    purpose: str
    calls: int
    bytes: int
    among: int | None = None  # number of neighbouring ranks of a fold that communicate; None: all ranks
    operation: Operation = "all_gather"
    when: When = "F"
    waits: bool = True

    def __add__(self, other: Sent) -> Sent:
        return replace(self, calls=self.calls + other.calls, bytes=self.bytes + other.bytes)


def build_transfer(case: Case, sent: Sent) -> Transfer:
    """Return the traffic as a `gangline.explain.explained.Transfer`, with the number of ranks and their links."""
    mesh, sizes = case.mesh, [size for _, size in case.config.topology.domains]
    fold = find_active_fold(case.plan, mesh, sent.axes[0].removeprefix(BESIDE))
    if fold is None:
        ranks, near = (
            count_together(mesh, sent.axes, sizes[0])[0],
            [count_together(mesh, sent.axes, size)[1] for size in sizes],
        )
    else:
        group = next(_iterate_groups(case, fold, sent.axes[0].startswith(BESIDE)))[: sent.among]
        ranks, near = len(group), [sum(rank // size == group[0] // size for rank in group) for size in sizes]
    return Transfer(
        axes=sent.axes,
        purpose=sent.purpose,
        operation=sent.operation,
        ranks=ranks,
        each_node=near[0],
        each_rack=near[1],
        each_datacentre=near[2],
        tier=find_slowest_tier(case, sent),
        calls=sent.calls,
        bytes=sent.bytes,
        when=sent.when,
        waits=sent.waits,
    )


@lru_cache(maxsize=1024)
def count_together(mesh: Mesh, axes: tuple[str, ...], node: int) -> tuple[int, int]:
    """Return the number of ranks along the axes, and how many of rank 0's group are in its node of `node` ranks."""
    if node >= mesh.world:
        return mesh.size(*axes), mesh.size(*axes)
    step, near = 1, [0]
    for axis, size in reversed(mesh.sizes):
        if axis in axes:
            near = [rank for first in near for rank in range(first, min(first + size * step, node), step)]
        step *= size
    return mesh.size(*axes), len(near)


def find_slowest_tier(case: Case, sent: Sent) -> Tier:
    """Return the slowest tier of links between any two ranks that communicate in `sent`."""
    network, name = case.config.topology, sent.axes[0]
    fold = find_active_fold(case.plan, case.mesh, name.removeprefix(BESIDE))
    if fold is None:
        return network.find_tier(case.mesh, *sent.axes)
    groups = _iterate_groups(case, fold, name.startswith(BESIDE))
    each = sent.among
    if each is not None:
        groups = (group[start : start + each] for group in groups for start in range(0, len(group), each))
    return network.find_slowest(groups)


def _iterate_groups(case: Case, fold: Fold, beside: bool) -> Iterator[list[int]]:
    """Yield the ranks of every group of the fold; with `beside`, of every group of ranks that hold the same shard."""
    mesh = case.mesh
    axes = tuple(axis for axis in mesh.axes if axis in fold.out_of)
    firsts = range(fold.size) if beside else range(0, mesh.size(*axes), fold.size)
    for point in mesh.iterate_along({}, [axis for axis in mesh.axes if axis not in axes]):
        for joint in firsts:
            first = mesh.rank({**point, **mesh.coordinate_along(axes, joint)})
            yield fold.list_rest_ranks(mesh, first) if beside else fold.list_ranks(mesh, first)


def gather(
    axes: tuple[str, ...], purpose: str, ranks: int, calls: int, nbytes: int, when: When = "F", waits: bool = True
) -> Sent:
    """Return the traffic of `calls` all-gathers (or reduce-scatters) over `ranks` ranks, each of `nbytes` in total."""
    return Sent(axes, purpose, calls, calls * nbytes * (ranks - 1) // ranks, None, "all_gather", when, waits)


def reduce(
    axes: tuple[str, ...], purpose: str, ranks: int, calls: int, nbytes: int, when: When = "F", waits: bool = True
) -> Sent:
    return Sent(axes, purpose, calls, 2 * calls * nbytes * (ranks - 1) // ranks, None, "all_reduce", when, waits)
