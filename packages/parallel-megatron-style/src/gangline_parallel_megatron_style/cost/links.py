"""Which links a message goes over, be it along axes of the mesh, over a fold, or between the ranks beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gangline.strategy import Fold
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.layout.topology import Tier
from gangline_parallel_megatron_style.sharding.ranks import active_fold

BESIDE = "beside "  # and the name of a fold: the ranks that hold the same part of it


@dataclass(frozen=True)
class Sent:
    """What one rank does along one axis (or several together) in a step, for one purpose.

    axes: those of the mesh; or the name of a fold; or `BESIDE` and that: the ranks with the same part of it.
    """

    axes: tuple[str, ...]
    purpose: str
    calls: int
    bytes: int
    among: int | None = None  # of a fold: so many neighbours, beyond whom nothing goes

    def __add__(self, other: Sent) -> Sent:
        return replace(self, calls=self.calls + other.calls, bytes=self.bytes + other.bytes)


def links(case: Case, sent: Sent) -> Tier:
    """The slowest links between any two ranks that are together in it."""
    network, name = case.config.topology, sent.axes[0]
    fold = active_fold(case.plan, case.mesh, name.removeprefix(BESIDE))
    if fold is None:
        return network.tier(case.mesh, *sent.axes)
    groups = _groups(case, fold, name.startswith(BESIDE))
    each = sent.among
    if each is not None:
        groups = (group[start : start + each] for group in groups for start in range(0, len(group), each))
    return network.slowest(groups)


def _groups(case: Case, fold: Fold, beside: bool) -> Iterator[list[int]]:
    """The ranks of every fold on the mesh, or of every group beside one."""
    mesh = case.mesh
    axes = tuple(axis for axis in mesh.axes if axis in fold.out_of)
    firsts = range(fold.size) if beside else range(0, mesh.size(*axes), fold.size)
    for point in mesh.along({}, [axis for axis in mesh.axes if axis not in axes]):
        for joint in firsts:
            first = mesh.rank({**point, **mesh.coordinate_along(axes, joint)})
            yield fold.beside(mesh, first) if beside else fold.ranks(mesh, first)
