"""Chunk shape of an array. It follows the sharding, so that every chunk has exactly one writer.

zarr's regular grid has one chunk shape for an array. Along each dim it is a divisor of the greatest common divisor of
all shard boundaries, so no boundary is ever inside a chunk. To save, ranks exchange no array data and read no chunks
(read-modify-write of shared chunks under locks is what made earlier zarr checkpoints slow). The cost: shard boundaries
at odd rows make small chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import gcd, prod

from gangline.config import find_divisors
from gangline.shard import Box, Division, Layout
from gangline_ckpt_zarr.format.dtypes import count_itemsize

# Maximum bytes of a chunk, if the sharding leaves a choice. Checking a chunk needs all its bytes, even if a rank needs
# only a part of the chunk. With chunks of 8 MiB, often as large as a rank's box, a load into twice as many ranks lost a
# third of its speed. With chunks below 1 MiB, the time that Python needs per chunk is noticeable.
CHUNK_BYTES = 1 << 20
SMALL = CHUNK_BYTES >> 3  # bytes: a chunk below this size may be replaced by a chunk above CHUNK_BYTES
LARGE = CHUNK_BYTES << 3  # maximum bytes of a chunk above CHUNK_BYTES


def chunk_shape(layout: Layout) -> tuple[int, ...]:
    """Return the shape of every chunk of an array; the last chunks may extend beyond the array's end."""
    return _chunk_shape(layout.shape, layout.divisions, CHUNK_BYTES // count_itemsize(layout.dtype))


@lru_cache(maxsize=1024)
def _chunk_shape(shape: tuple[int, ...], divisions: tuple[Division, ...], left: int) -> tuple[int, ...]:
    """Return the chunk shape for arrays with this shape and sharding; `left`: maximum number of elements."""
    layout, chunk = Layout(shape, divisions=divisions), list[int]()
    for length, step in zip(reversed(layout.shape), reversed(compute_spacing(layout)), strict=True):
        length = max(1, length)
        side = _choose_divisor(step, left) if step else -(-length // -(-length // left))
        chunk.append(side)
        whole = side == (step or length)
        left = max(1, left // side) if whole else 1
    return tuple(reversed(chunk))


def _choose_divisor(step: int, left: int) -> int:
    """Return the length of a chunk along a dim: the largest divisor of `step` up to `left`.

    If chunks would be smaller than `SMALL`, return the next larger divisor, unless chunks would exceed `LARGE`.
    """
    sides = find_divisors(step)
    fitting = max((d for d in sides if d <= left), default=1)
    if fitting * CHUNK_BYTES < left * SMALL:
        above = next((d for d in sides if d > left), None)
        if above is not None and above * CHUNK_BYTES <= left * LARGE:
            return above
    return fitting


def compute_spacing(layout: Layout) -> tuple[int, ...]:
    """Return, per dim, the greatest common divisor of all boundaries except the array's end; 0: no boundaries."""
    steps = [0] * len(layout.shape)
    for dim, position in _find_boundaries(layout):
        if position < layout.shape[dim]:
            steps[dim] = gcd(steps[dim], position)
    return tuple(steps)


def _find_boundaries(layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield (dim, position) of every boundary. Only nested divisions over rows require a list of all boxes."""
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
    """Yield (dim, position) of the boundaries of a division over rows: row numbers unravelled over the leading dims."""
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
        if rest:  # outer dims are split on both sides of the slice that holds the row
            for outer in reversed(range(dim)):
                row, at = divmod(row, lead[outer])
                yield outer, box.offset[outer] + at
                yield outer, box.offset[outer] + at + 1
            return
