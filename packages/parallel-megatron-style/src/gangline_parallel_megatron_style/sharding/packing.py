"""Packing of a parameter group's arrays into flat buffers that ranks shard evenly, between rows. Imports no torch.

A parameter group (a block) is gathered and reduced in one collective, so its arrays are in one buffer, which n ranks
shard into n ranges of equal length. No row may be split, and every array must be one view of the buffer, so padding
inside an array is impossible. Therefore the range length is a multiple of the row widths, and each array begins at a
multiple of its own width. An array of one dim is one row. If the widths have no small common multiple, the arrays of
each width have a separate buffer.

A checkpoint stores an array in chunks that no shard border may split, so the number of rows of a chunk divides the
greatest common divisor of the array's borders: borders at rows 2050 and 4211 leave chunks of one row, a million chunks
in a model of 8 B parameters. So the length of a range is a multiple of a grain: the least common multiple of the row
widths times the largest power of two that costs no more than 1 % of padding. It is a power of two because numbers of
heads and features have many factors of two, so the grain also fits other layouts. The starts of arrays matter as much
as the starts of ranges: wide arrays come first and single rows last, so that few starts are off the grain. Padding is
between arrays, which begin on the largest fitting multiple of the grain that divides a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

ALIGNED = 8  # alignment of array starts in elements, for 16-bit kernels, in a buffer that is not sharded
WASTE = 1.1  # maximum size of one buffer relative to its arrays; above it, separate buffers by row width are tried
GRAIN = 0.01  # maximum additional padding for borders on a coarse grain, relative to the arrays


@dataclass(frozen=True)
class ArrayRows:
    """An array on a rank: `count` rows of `width` elements."""

    name: str
    count: int
    width: int

    @property
    def size(self) -> int:
        return self.count * self.width


@dataclass(frozen=True)
class Packing:
    """One buffer: `parts` ranges of `length` elements each, and `starts`, the offset of each array in the buffer."""

    arrays: tuple[ArrayRows, ...]
    starts: tuple[int, ...]
    parts: int
    length: int

    @property
    def size(self) -> int:
        return self.parts * self.length

    def compute_row_bounds(self, index: int) -> tuple[int, ...]:
        """Return the number of rows of array `index` that begin before each range, and before the buffer's end."""
        array, start = self.arrays[index], self.starts[index]
        return tuple(
            min(max(-(-(part * self.length - start) // array.width), 0), array.count) for part in range(self.parts + 1)
        )


def pack(arrays: Sequence[ArrayRows], parts: int) -> list[Packing]:
    """Return buffers for the arrays: one buffer if it wastes little memory, else one for each row width."""
    if parts == 1:
        return [_pack(arrays, 1, 1)] if arrays else []
    together = _pack(arrays, parts, lcm(*(array.width for array in arrays if array.count > 1))) if arrays else None
    if together is None or together.size <= WASTE * sum(array.size for array in arrays):
        return [_align_to_grain(together)] if together else []
    widths = dict.fromkeys(array.width for array in arrays)
    apart = [_pack([array for array in arrays if array.width == width], parts, width) for width in widths]
    packings = apart if sum(packing.size for packing in apart) < together.size else [together]
    return [_align_to_grain(packing) for packing in packings]


def _align_to_grain(least: Packing) -> Packing:
    """Return the packing with all range borders on the largest grain whose padding is below `GRAIN`."""
    stacks = sorted((array for array in least.arrays if array.count > 1), key=lambda array: -array.width)
    if not stacks:
        return least
    arrays = [*stacks, *(array for array in least.arrays if array.count == 1)]
    multiple = lcm(*(array.width for array in stacks))
    limit = least.size + GRAIN * sum(array.size for array in arrays)
    for power in reversed(range(max(array.count for array in stacks).bit_length())):
        packing = _pack(arrays, least.parts, multiple << power, multiple << power)
        if packing.size <= limit:
            return _spread(packing, multiple << power)
    return least


def _spread(packing: Packing, grain: int) -> Packing:
    """Return the packing with array starts on the largest possible multiple of the grain that divides a range."""
    for step in range(packing.length, grain, -grain):
        if packing.length % step == 0:
            starts = _place(packing.arrays, packing.parts, packing.length, step)
            if starts is not None:
                return replace(packing, starts=tuple(starts))
    return packing


def _pack(arrays: Sequence[ArrayRows], parts: int, multiple: int, grain: int = 1) -> Packing:
    """Pack the arrays into `parts` ranges of the least length that fits and is a multiple of `multiple`."""
    least = max(-(-sum(array.size for array in arrays) // parts), *(array.width for array in arrays))
    length = -(-least // multiple) * multiple
    while (starts := _place(arrays, parts, length, grain)) is None:
        length += multiple
    return Packing(tuple(arrays), tuple(starts), parts, length)


def _place(arrays: Sequence[ArrayRows], parts: int, length: int, grain: int) -> list[int] | None:
    """Return the start of each array in a buffer of `parts` ranges of `length`, or None if the arrays do not fit."""
    starts, free = [], 0
    for array in arrays:
        if parts == 1:
            free = -(-free // ALIGNED) * ALIGNED
        else:
            free = -(-free // array.width) * array.width
            if free // length != (free + array.size - 1) // length:  # a border would split the array
                step = length if array.count == 1 else lcm(grain, array.width)
                free = -(-free // step) * step
        starts.append(free)
        free += array.size
    return starts if free <= parts * length else None
