"""How the arrays of a unit lie in flat buffers that ranks share evenly, cut between rows. Torch-free.

A unit (a block) is gathered and reduced in one piece, so its arrays lie in one buffer, which n ranks cut into n ranges
of equal length. No row may be cut, and every array must be one view of the buffer, so nothing may be put into the
middle of an array: the range length is a multiple of the row widths, and each array begins at a multiple of its own
width. An array of one dim is one row. Where the widths have no small common multiple, arrays of each width have a
buffer of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

ALIGNED = 8  # elements: what kernels for 16-bit numbers like, where nothing else says where an array begins
WASTE = 1.1  # how much longer than its arrays one buffer may be before several are better


@dataclass(frozen=True)
class Rows:
    """An array as a rank has it: `count` rows of `width` elements."""

    name: str
    count: int
    width: int

    @property
    def size(self) -> int:
        return self.count * self.width


@dataclass(frozen=True)
class Packing:
    """One buffer: `parts` ranges of `length` elements each, and where in it each array begins."""

    arrays: tuple[Rows, ...]
    starts: tuple[int, ...]
    parts: int
    length: int

    @property
    def size(self) -> int:
        return self.parts * self.length

    def bounds(self, index: int) -> tuple[int, ...]:
        """How many rows of the array number `index` begin before each range, and before the end."""
        array, start = self.arrays[index], self.starts[index]
        return tuple(
            min(max(-(-(part * self.length - start) // array.width), 0), array.count) for part in range(self.parts + 1)
        )


def pack(arrays: Sequence[Rows], parts: int) -> list[Packing]:
    """Buffers for these arrays, in order: one where that wastes little, else one for each width of rows."""
    if parts == 1:
        return [_pack(arrays, 1, 1)] if arrays else []
    together = _pack(arrays, parts, lcm(*(array.width for array in arrays if array.count > 1))) if arrays else None
    if together is None or together.size <= WASTE * sum(array.size for array in arrays):
        return [together] if together else []
    widths = dict.fromkeys(array.width for array in arrays)
    apart = [_pack([array for array in arrays if array.width == width], parts, width) for width in widths]
    return apart if sum(packing.size for packing in apart) < together.size else [together]


def _pack(arrays: Sequence[Rows], parts: int, multiple: int) -> Packing:
    """The shortest range length, a multiple of `multiple`, into whose ranges the arrays fit."""
    least = max(-(-sum(array.size for array in arrays) // parts), *(array.width for array in arrays))
    length = -(-least // multiple) * multiple
    while (starts := _place(arrays, parts, length)) is None:
        length += multiple
    return Packing(tuple(arrays), tuple(starts), parts, length)


def _place(arrays: Sequence[Rows], parts: int, length: int) -> list[int] | None:
    """Where each array begins, or None where they do not fit."""
    starts, free = [], 0
    for array in arrays:
        if parts == 1:
            free = -(-free // ALIGNED) * ALIGNED
        else:
            free = -(-free // array.width) * array.width
            if array.count == 1 and free // length != (free + array.width - 1) // length:
                free = -(-free // length) * length
        starts.append(free)
        free += array.size
    return starts if free <= parts * length else None
