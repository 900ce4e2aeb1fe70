"""Offsets of the arrays in a flat buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor

from gangline_parallel_megatron_style.sharding.packing import Packing


@dataclass(frozen=True)
class BufferViews:
    """Arrays of one packing with their shapes on this rank. `index`: index of this rank's range of the buffer."""

    packing: Packing
    shapes: Mapping[str, tuple[int, ...]]
    index: int

    @cached_property
    def _starts(self) -> dict[str, int]:
        return {array.name: start for array, start in zip(self.packing.arrays, self.packing.starts, strict=True)}

    @property
    def own(self) -> slice:
        """Return this rank's range as a slice of the full buffer."""
        return slice(self.index * self.packing.length, (self.index + 1) * self.packing.length)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Return an array as a view of the full buffer."""
        start, shape = self._starts[name], self.shapes[name]
        return flat[start : start + prod(shape)].view(shape)

    def locate(self, name: str) -> int:
        """Return the offset, in this rank's range, of the first element of an array that the range holds."""
        return max(self._starts[name] - self.own.start, 0)

    @cached_property
    def gaps(self) -> list[slice]:
        """Return the slices of the buffer that belong to no array."""
        return find_gaps([(self._starts[name], prod(shape)) for name, shape in self.shapes.items()], self.packing.size)


def find_gaps(taken: Sequence[tuple[int, int]], size: int) -> list[slice]:
    """Return the gaps around the `taken` intervals (start, length) in a buffer of `size` elements."""
    gaps, free = [], 0
    for start, length in [*sorted(taken), (size, 0)]:
        if start > free:
            gaps.append(slice(free, start))
        free = start + length
    return gaps
