"""The chunk shape of an array: it follows the cuts, so that every chunk has exactly one writer.

zarr's regular grid has one chunk shape for an array. Along each dim it is a divisor of the greatest common divisor of
all boundaries there, so no boundary ever falls inside a chunk. Nothing is moved between ranks to save, and nobody
reads before it writes (read-modify-write of shared chunks under locks is what made earlier zarr checkpoints slow). The
price: cuts at odd rows make small chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import gcd, prod

from gangline.config import find_divisors
from gangline.shard import Box, Division, Layout
from gangline_ckpt_zarr.format.dtypes import count_itemsize

# No chunk is larger where the cuts leave the choice. Whole chunks are read to be checked, so 8 MiB cost a load into
# twice as many ranks a third of its speed: a rank's boxes are often no larger. Below 1 MiB Python's time shows.
CHUNK_BYTES = 1 << 20
SMALL = CHUNK_BYTES >> 3  # a chunk smaller than this may give way to one that is larger than CHUNK_BYTES
LARGE = CHUNK_BYTES << 3  # but not larger than this


def chunk_shape(layout: Layout) -> tuple[int, ...]:
    """The shape of every chunk of an array; at the array's ends chunks reach beyond it."""
    return _chunk_shape(layout.shape, layout.divisions, CHUNK_BYTES // count_itemsize(layout.dtype))


@lru_cache(maxsize=1024)
def _chunk_shape(shape: tuple[int, ...], divisions: tuple[Division, ...], left: int) -> tuple[int, ...]:
    """The same for all arrays of one shape and cut; `left`: elements of a chunk, at most."""
    layout, chunk = Layout(shape, divisions=divisions), list[int]()
    for length, step in zip(reversed(layout.shape), reversed(compute_spacing(layout)), strict=True):
        length = max(1, length)
        side = _choose_divisor(step, left) if step else -(-length // -(-length // left))
        chunk.append(side)
        whole = side == (step or length)
        left = max(1, left // side) if whole else 1
    return tuple(reversed(chunk))


def _choose_divisor(step: int, left: int) -> int:
    """The largest divisor of `step` up to `left`; where that is small, the next larger one if it is not huge."""
    sides = find_divisors(step)
    fitting = max((d for d in sides if d <= left), default=1)
    if fitting * CHUNK_BYTES < left * SMALL:
        above = next((d for d in sides if d > left), None)
        if above is not None and above * CHUNK_BYTES <= left * LARGE:
            return above
    return fitting


def compute_spacing(layout: Layout) -> tuple[int, ...]:
    """Per dim the greatest step on whose multiples all boundaries lie, the array's end apart; 0: there are none."""
    steps = [0] * len(layout.shape)
    for dim, position in _find_boundaries(layout):
        if position < layout.shape[dim]:
            steps[dim] = gcd(steps[dim], position)
    return tuple(steps)


def _find_boundaries(layout: Layout) -> Iterator[tuple[int, int]]:
    """(dim, position) of every boundary, without listing the boxes."""
    for number, division in enumerate(layout.divisions):
        if not division.rows:
            yield from ((division.dim, bound) for bound in division.bounds[0])
            continue
        if any(earlier.rows for earlier in layout.divisions[:number]):
            for dim, positions in enumerate(layout.list_boundaries()):
                yield from ((dim, position) for position in positions)
            return
        yield from _split_rows(layout, layout.divisions[:number], division)


def _split_rows(layout: Layout, earlier: tuple[Division, ...], division: Division) -> Iterator[tuple[int, int]]:
    """Where a division over rows cuts each dim: a row number unravelled over the leading dims of what it divides."""
    outer = Layout(layout.shape, layout.dtype, earlier)
    for number, parts in enumerate(product(*(range(cut.parts) for cut in earlier))):
        bounds = division.bounds[number] if len(division.bounds) > 1 else division.bounds[0]
        for box in outer.list_boxes(parts):
            for row in set(bounds):
                yield from _unravel(box, row)


def _unravel(box: Box, row: int) -> Iterator[tuple[int, int]]:
    lead = box.shape[:-1]
    if not 0 < row < prod(lead):
        return
    for dim in reversed(range(len(lead))):
        row, rest = divmod(row, lead[dim])
        yield dim, box.offset[dim] + rest
        if rest:  # the dims before it are cut on both sides of the slice that holds the row
            for outer in reversed(range(dim)):
                row, at = divmod(row, lead[outer])
                yield outer, box.offset[outer] + at
                yield outer, box.offset[outer] + at + 1
            return
