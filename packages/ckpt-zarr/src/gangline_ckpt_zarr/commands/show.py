"""`gangline ckpt show`: the content of a checkpoint, without reading an array."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from gangline.shard import Division, Layout
from gangline_ckpt_zarr.commands import text
from gangline_ckpt_zarr.commands.where import PLACES, Copy, find_place, make_parser
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.dtypes import count_itemsize, map_dtype
from gangline_ckpt_zarr.format.native import NativeMeta

_NUMBER = re.compile(r"(?<=[./])\d+(?=[./]|$)")
HEAD = ("array", "shape", "dtype", "chunk", "chunks", "stored", "sharding")


def run(argv: Sequence[str]) -> int:
    """Print the main fields of the metadata document, and the tree of arrays."""
    words = make_parser("show", "Show the arrays and the main metadata of a checkpoint.")
    words.add_argument("place", metavar="CHECKPOINT", nargs="+", help=PLACES)
    words.add_argument(
        "--each", action="store_true", help="one line per array, also for arrays that differ only in a block number"
    )
    words.add_argument("--document", action="store_true", help="print only the metadata document, as JSON")
    options = words.parse_args(list(argv))
    copies = find_place(options.place).select_tier(options.tier).list_copies()
    meta = copies[0].meta
    if options.document:
        print(json.dumps(meta.document, indent=2))
        return 0
    for name, value in _describe_checkpoint(copies, meta):
        print(f"{name:10} {value}")
    print()
    print(text.format_table(HEAD, list(_format_tree(meta, options.each)), right="chunks stored"))
    return 0


def _describe_checkpoint(copies: list[Copy], meta: Meta) -> Iterator[tuple[str, str]]:
    document = meta.document
    yield "checkpoint", text.place(copies[0].store.url)
    if len(copies) > 1:
        yield "also in", ", ".join(text.place(copy.store.url) for copy in copies[1:])
    for name in ("step", "attempt", "cursor", "tokens", "seed"):
        if name in document:
            yield name, f"{document[name]:,}"
    is_open = isinstance(meta, NativeMeta)
    sizes = document.get("mesh", {}) if is_open else dict(meta.registry.mesh.sizes)
    mesh = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    yield "mesh", mesh or "one process"
    parts = list(_format_parts(document.get("parts", {})))
    if parts:
        yield "parts", ", ".join(parts)
    pairs = zip(*_list_layouts_and_chunks(meta), strict=True)
    count = len(meta.registry.layouts)
    nbytes = sum(_count_stored_bytes(layout, chunk, meta.trailer) for layout, chunk in pairs)
    files = (
        "files that any zarr reader opens"
        if is_open
        else f"up to {text.format_count(meta.registry.mesh.world, 'file')}"
    )
    yield "arrays", f"{count:,}, {text.size(nbytes)} in {files}"


def _format_parts(parts: dict[str, Any]) -> Iterator[str]:
    for group, choice in parts.items():
        for entry in choice if isinstance(choice, list) else [choice]:
            yield f"{group}={entry['part']}"


def _list_layouts_and_chunks(meta: Meta) -> tuple[list[Layout], list[tuple[int, ...]]]:
    return list(meta.registry.layouts.values()), [meta.files.chunk(name) for name in meta.registry]


def _count_chunks(layout: Layout, chunk: tuple[int, ...]) -> int:
    return prod(-(-length // side) for length, side in zip(layout.shape, chunk, strict=True))


def _count_stored_bytes(layout: Layout, chunk: tuple[int, ...], trailer: int) -> int:
    """Return the stored bytes of an array's chunks, including the `trailer` bytes after each chunk."""
    return _count_chunks(layout, chunk) * (prod(chunk) * count_itemsize(layout.dtype) + trailer)


@dataclass
class _Alike:
    """Arrays that differ only in numbers in their names, such as the arrays of a model's blocks."""

    layout: Layout
    chunk: tuple[int, ...]
    cut: str
    numbers: list[list[str]] = field(default_factory=list)


def _format_tree(meta: Meta, each: bool) -> Iterator[tuple[str, ...]]:
    """Yield a row for each group and array; without `each`, arrays that differ only in numbers share a row."""
    kinds: dict[tuple, _Alike] = {}
    for name, layout in meta.registry.layouts.items():
        chunk, cut = meta.files.chunk(name), _open(layout) if isinstance(meta, NativeMeta) else _cut(layout, each)
        template = name if each else _NUMBER.sub("{}", name)
        key = template, layout.shape, layout.dtype, chunk, cut
        alike = kinds.setdefault(key, _Alike(layout, chunk, cut))
        alike.numbers.append([] if each else _NUMBER.findall(name))
    above: list[str] = []
    for (template, *_), alike in kinds.items():
        numbers = [_format_ranges(sorted(set(map(int, column)))) for column in zip(*alike.numbers, strict=True)]
        *groups, leaf = (template.format(*numbers) if not each else template).split("/")
        for depth, group in enumerate(groups):
            if groups[: depth + 1] != above[: depth + 1]:
                yield ("  " * depth + group, *[""] * (len(HEAD) - 1))
        above = groups
        count, layout, chunk = len(alike.numbers), alike.layout, alike.chunk
        stored_dtype = map_dtype(layout.dtype)
        yield (
            "  " * len(groups) + leaf + (f"  ({count})" if count > 1 else ""),
            text.format_shape(layout.shape),
            layout.dtype if stored_dtype == layout.dtype else f"{layout.dtype} as {stored_dtype}",
            text.format_shape(chunk),
            f"{count * _count_chunks(layout, chunk):,}",
            text.size(count * _count_stored_bytes(layout, chunk, meta.trailer)),
            alike.cut,
        )


def _format_ranges(numbers: list[int]) -> str:
    """Return numbers as ranges, such as 0-3,7."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, run)) for run in ranges)


def _open(layout: Layout) -> str:
    return "a file for each chunk" if layout.divisions or not layout.shape else "one shard"


def _cut(layout: Layout, named: bool) -> str:
    """Describe how an array was sharded; `named`: include the number of the array's pipeline stage."""
    stages = [f"{axis} {index}" if named else f"one stage of {axis}" for axis, index in layout.at]
    return ", ".join([*stages, *map(_describe_division, layout.divisions)]) or "not sharded"


def _describe_division(division: Division) -> str:
    what = "rows" if division.rows else f"dim {division.dim}"
    return f"{what} over {'·'.join(division.axes)} ({division.parts})"
