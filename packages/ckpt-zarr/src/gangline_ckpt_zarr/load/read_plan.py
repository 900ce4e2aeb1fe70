"""Read plan: the chunks that overlap the wanted boxes of arrays, grouped by file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gangline.shard import Box
from gangline_ckpt_zarr.format import overlap
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.chunks import ChunkRun


@dataclass(frozen=True)
class Target:
    """A wanted box of an array and the memory to fill; `bits`: the memory holds the bits of bfloat16 as int16."""

    name: str
    box: Box
    array: np.ndarray
    bits: bool = False

    def put(self, part: Box, values: np.ndarray) -> None:
        """Store the values of a part of the box."""
        if self.bits:
            values = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.int16)
        self.array[part.slice_within(self.box)] = values


@dataclass(frozen=True)
class ReadItem:
    """`count` consecutive chunks of a run, from number `first` on, that overlap a target."""

    run: ChunkRun
    first: int
    count: int
    target: Target


def plan_reads(meta: Meta, targets: Iterable[Target]) -> dict[int, list[ReadItem]]:
    """Return the items to read from each rank's file, by rank, in file order."""
    items: dict[int, list[ReadItem]] = defaultdict(list)
    for target in targets:
        for rank, box in overlap.find_stored_boxes(meta.registry, target.name, target.box):
            run = meta.files.get_rank_file(rank).by_box[target.name, box.offset]
            items[rank] += [ReadItem(run, first, count, target) for first, count in run.find_chunk_ranges(target.box)]
    for of_rank in items.values():
        of_rank.sort(key=lambda item: item.run.base + item.first * item.run.stride)
    return items
