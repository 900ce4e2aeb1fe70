"""Where in a flat buffer each array lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor

from gangline_parallel_megatron_style.sharding.packing import Packing


@dataclass(frozen=True)
class BufferViews:
    """Arrays of one packing, of these shapes on this rank, which has the range number `index` of the buffer."""

    packing: Packing
    shapes: Mapping[str, tuple[int, ...]]
    index: int

    @cached_property
    def _starts(self) -> dict[str, int]:
        return {array.name: start for array, start in zip(self.packing.arrays, self.packing.starts, strict=True)}

    @property
    def own(self) -> slice:
        """This rank's range."""
        return slice(self.index * self.packing.length, (self.index + 1) * self.packing.length)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """An array, as a view of the whole buffer."""
        start, shape = self._starts[name], self.shapes[name]
        return flat[start : start + prod(shape)].view(shape)

    def locate(self, name: str) -> int:
        """Where in this rank's range the rows begin that it has of an array."""
        return max(self._starts[name] - self.own.start, 0)

    @cached_property
    def gaps(self) -> list[slice]:
        """What of the buffer no array has."""
        return find_gaps([(self._starts[name], prod(shape)) for name, shape in self.shapes.items()], self.packing.size)


def find_gaps(taken: Sequence[tuple[int, int]], size: int) -> list[slice]:
    """What of a buffer of `size` lies between runs (start, length), before and behind them."""
    gaps, free = [], 0
    for start, length in [*sorted(taken), (size, 0)]:
        if start > free:
            gaps.append(slice(free, start))
        free = start + length
    return gaps
