"""`gangline ckpt diff`: compare two checkpoints, array by array, with only a few chunks in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import nan, prod
from typing import Any

import numpy as np

from gangline import UserError
from gangline.shard import Box
from gangline_ckpt_zarr.commands import text
from gangline_ckpt_zarr.commands.where import PLACES, Copy, find_places, make_parser
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.dtypes import map_dtype
from gangline_ckpt_zarr.load.read_plan import Target
from gangline_ckpt_zarr.load.reader import read_target

BLOCK = 8 << 20  # maximum bytes of an array (in float64) that are compared at once
# Fields of the metadata document that describe how a run was executed, not its training state. Differences in these
# fields are printed, but the checkpoints count as equal.
CARRIED = ("attempt", "mesh", "config", "parts", "version")


def run(argv: Sequence[str]) -> int:
    """Print all differences; return 1 if arrays or the state of training differ. Raises UserError, BadCheckpoint."""
    words = make_parser("diff", "Compare two checkpoints: arrays, shapes, values, documents.")
    words.add_argument("places", metavar="CHECKPOINT", nargs="+", help=f"two checkpoints, each as {PLACES}")
    options = words.parse_args(list(argv))
    places = find_places(options.places)
    if len(places) != 2:
        raise UserError(f"diff needs two checkpoints, got {len(places)}.", f"Name a checkpoint as {PLACES}.")
    one, other = (place.select_tier(options.tier).copy() for place in places)
    print(f"a  {text.place(one.store.url)}\nb  {text.place(other.store.url)}\n")
    for copy in (one, other):
        copy.check_sizes()
    fields = list(_compare_fields(one.meta.document, other.meta.document))
    rows, alike = _compare_arrays(one, other)
    if rows:
        print(text.format_table(("array", "max abs difference", "differing", "note"), rows, right="differing"))
    for name, a, b in fields:
        print(f"document: {name}: {_shorten(a)} -> {_shorten(b)}")
    print(
        f"{'' if not (rows or fields) else chr(10)}{text.format_count(alike, 'array')} equal, {len(rows):,} different"
    )
    state = [name for name, *_ in fields if name.partition(".")[0] not in CARRIED]
    return 1 if rows or state else 0


# --- documents --------------------------------------------------------------------------------------------------------

_NONE = object()


def _compare_fields(one: Any, other: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value in `one`, value in `other`) of every field that differs."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            yield from _compare_fields(
                one.get(key, _NONE), other.get(key, _NONE), f"{name}.{key}" if name else str(key)
            )
    elif one != other:
        yield name, one, other


def _shorten(value: Any) -> str:
    if value is _NONE:
        return "(none)"
    string = str(value)
    return string if len(string) <= 60 else f"{string[:57]}..."


# --- arrays -----------------------------------------------------------------------------------------------------------


@dataclass
class Difference:
    """Largest absolute difference of two arrays, and number of elements that differ.

    The largest difference is nan if an element is nan in only one of the arrays.
    """

    largest: float = 0.0
    count: int = 0

    def add(self, one: np.ndarray, other: np.ndarray) -> None:
        """Add the differences of a part of both arrays; two nans are equal."""
        same = one == other
        if one.dtype.kind == "f" and other.dtype.kind == "f":
            same |= np.isnan(one) & np.isnan(other)
        count = same.size - int(np.count_nonzero(same))
        if count:
            self.count += count
            a, b = one[~same], other[~same]
            exact = a.dtype.kind in "iu" and b.dtype == a.dtype  # in floating point 2**53 + 1 would equal 2**53
            differences = np.maximum(a, b) - np.minimum(a, b) if exact else np.abs(_widen(a) - _widen(b))
            differences = differences.view(f"u{differences.itemsize}") if exact else differences
            largest = float(differences.max())
            self.largest = nan if self.largest != self.largest or largest != largest else max(self.largest, largest)


def _widen(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64)


def _compare_arrays(one: Copy, other: Copy) -> tuple[list[tuple[str, ...]], int]:
    """Return a row for each array that differs, and the number of equal arrays."""
    rows: list[tuple[str, ...]] = []
    alike = 0
    registry, theirs = one.meta.registry, other.meta.registry
    common = [name for name in registry if name in theirs and registry[name].shape == theirs[name].shape]
    with text.show_progress("diff", sum(registry[name].nbytes for name in common)) as advance:
        for name in {**registry.layouts, **theirs.layouts}:
            if name not in theirs or name not in registry:
                rows.append((name, "", "", f"only in {'a' if name in registry else 'b'}"))
                continue
            a, b = registry[name], theirs[name]
            if a.shape != b.shape:
                rows.append((name, "", "", f"{text.format_shape(a.shape)} in a, {text.format_shape(b.shape)} in b"))
                continue
            difference = Difference()
            for box in _split_into_blocks(one.meta, name):
                difference.add(_read(one, name, box), _read(other, name, box))
            advance(a.nbytes)
            note = "" if a.dtype == b.dtype else f"{a.dtype} in a, {b.dtype} in b"
            if difference.count or note:
                share = f"{difference.count:,} of {prod(a.shape):,}"
                rows.append((name, f"{difference.largest:.6g}", share, note))
            else:
                alike += 1
    return rows, alike


def _split_into_blocks(meta: Meta, name: str) -> Iterator[Box]:
    """Yield boxes of about `BLOCK` bytes that tile an array along its chunk grid, so that chunks are read once."""
    layout = meta.registry[name]
    sides, budget = list(meta.files.chunk(name)), BLOCK // (8 * max(1, prod(meta.files.chunk(name))))
    for dim in reversed(range(len(sides))):
        chunks = max(1, min(budget, -(-layout.shape[dim] // sides[dim])))
        budget //= chunks
        sides[dim] *= chunks
    for offset in product(*(range(0, length, side) for length, side in zip(layout.shape, sides, strict=True))):
        ends = (min(start + side, length) for start, side, length in zip(offset, sides, layout.shape, strict=True))
        yield Box(offset, tuple(end - start for start, end in zip(offset, ends, strict=True)))


def _read(copy: Copy, name: str, box: Box) -> np.ndarray:
    """Return a part of an array in its stored dtype. Raises BadCheckpoint."""
    array = np.empty(box.shape, map_dtype(copy.meta.registry[name].dtype))
    read_target(copy.meta, copy.store, Target(name, box, array))
    return array
