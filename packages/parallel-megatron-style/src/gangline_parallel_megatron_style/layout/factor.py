"""Derivation of the axis sizes that the user left unset from the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log, prod

from gangline import UserError
from gangline.config import find_divisors
from gangline.mesh import AXES


def find_nearest(wanted: int, choices: Sequence[int], count: int = 2) -> list[int]:
    """Return, ascending, the `count` values of `choices` whose ratio to `wanted` is closest to 1."""
    return sorted(sorted(choices, key=lambda value: (abs(log(value / max(wanted, 1))), value))[:count])


def derive_axis_sizes(
    world: int, named: Mapping[str, int | None], wishes: Mapping[str, int], takers: Sequence[str]
) -> dict[str, int]:
    """Return the sizes of all mesh axes, in mesh order; their product is `world`.

    named   axis -> size that the user set; None: unset
    wishes  axis -> preferred size of an unset axis, used if it divides the remaining ranks; tried in this order
    takers  axes; the first unset axis among them takes all remaining ranks

    Raises UserError, with the nearest layouts, if the sizes that the user set do not fit `world`.
    """
    sizes = {axis: size for axis in AXES if (size := named.get(axis)) is not None}
    open_ranks, remainder = divmod(world, prod(sizes.values()))
    taker = next((axis for axis in takers if axis not in sizes), None)
    if remainder or (taker is None and open_ranks != 1):
        raise _make_layout_error(world, sizes, taker is not None)
    for axis, size in wishes.items():
        if axis not in sizes and axis != taker and open_ranks % size == 0:
            sizes[axis], open_ranks = size, open_ranks // size
    if taker is not None:
        sizes[taker] = open_ranks
    return {axis: sizes.get(axis, 1) for axis in AXES}


class LayoutError(UserError):
    """Error for axis sizes that do not fit the number of ranks, with the nearest fitting values.

    sizes   (axis, size) changes that make the layout fit, nearest first
    worlds  numbers of processes that fit the axis sizes
    """

    def __init__(self, what: str, why: str, sizes: Sequence[tuple[str, int]], worlds: Sequence[int]) -> None:
        self.sizes, self.worlds = list(sizes), list(worlds)
        near = [f"parallel.{axis}={size}" for axis, size in self.sizes[:3]]
        near += [f"launch.processes={size}" for size in self.worlds]
        super().__init__(what, why, f"Nearest: {'; or '.join(near)}.")

    def __reduce__(self) -> tuple:
        return UserError, (self.what, *self.details)


def _make_layout_error(world: int, sizes: Mapping[str, int], some_open: bool) -> UserError:
    used_sizes = {axis: size for axis, size in sizes.items() if size > 1} or {"every axis": 1}
    product = prod(sizes.values())
    layout = " x ".join(f"{axis} {size}" for axis, size in used_sizes.items())
    total = f" = {product}" if len(used_sizes) > 1 else ""
    why = "The product of the given axis sizes must divide the number of processes."
    if not some_open:
        why = (
            "All axes that could take more ranks are set, so the product of the sizes must be the number of processes."
        )
    elif product < world:
        why = f"{world} is not a multiple of {product}. " + why
    worlds = {product} if not some_open else {max(1, world // product) * product, -(-world // product) * product}
    changes = list(_suggest_changes(world, sizes, some_open))
    return LayoutError(f"{layout}{total} does not fit {world} processes.", why, changes, sorted(worlds))


def _suggest_changes(world: int, sizes: Mapping[str, int], some_open: bool) -> Iterator[tuple[str, int]]:
    """Return (axis, size) changes, smallest first; each change alone makes the layout fit."""
    changes = []
    for axis, size in sizes.items():
        others = prod(sizes.values()) // size
        if world % others == 0:
            fitting = find_divisors(world // others) if some_open else [world // others]
            changes += [(abs(log(other / size)), axis, other) for other in fitting if other != size]
    return ((axis, size) for _, axis, size in sorted(changes))
