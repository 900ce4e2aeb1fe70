"""Shared load: ranks that hold equal boxes each read some slices from a remote store, and send them to the others.

Replicas need equal bytes, and without sharing a remote store would send the bytes to every replica. All ranks compute
from the registry which rank reads which rows, so no gather is needed. At most `TOGETHER` ranks share a box, so the
bytes that a rank sends do not grow with the world size: 1,024 replicas read a store 128 times instead of 1,024 times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gangline.shard import Box, Registry
from gangline_ckpt_zarr.agreement import Agreement
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.dtypes import count_itemsize
from gangline_ckpt_zarr.format.owners import get_box_owners
from gangline_ckpt_zarr.load.read_plan import Target

TOGETHER = 8  # maximum number of ranks that share a box
SLICE = 32 << 20  # target size of a slice, in bytes: smaller slices balance better but are fetched more slowly
STEP = 256 << 20  # bytes of full arrays per exchange: limits the memory of send and receive buffers


@dataclass(frozen=True)
class SharedSlice:
    """Rows (`box`) of a box (`whole`) that all `ranks` hold; the rank `reader`, one of `ranks`, reads the rows.

    `step`: number of the exchange in which the other ranks receive the rows.
    """

    name: str
    box: Box
    whole: Box
    ranks: tuple[int, ...]
    reader: int
    step: int


def split_shared(meta: Meta, registry: Registry, rank: int, together: int = TOGETHER) -> Iterator[SharedSlice]:
    """Yield the boxes that `rank` holds, split into slices that are each read by one rank.

    All ranks that share a slice compute the same reader and step for the slice. Slices are in the registry's order, so
    any two ranks process their common slices in the same order.
    """
    read: dict[tuple[int, ...], list[int]] = {}  # ranks that share -> bytes that each of these ranks reads
    offset = 0
    for name, layout in registry.layouts.items():
        step, offset = offset // STEP, offset + layout.nbytes
        boxes = [box for box, _ in registry.list_rank_boxes(name, rank) if box.size]
        if not boxes:
            continue
        ranks = get_box_owners(registry.mesh, layout).list_replicas(rank, together)
        bytes_of = read.setdefault(ranks, [0] * len(ranks))
        for whole in boxes:
            for box in _split_rows(whole, meta.files.chunk(name), count_itemsize(layout.dtype)):
                number = _choose_reader(bytes_of, layout.turn)
                bytes_of[number] += box.size * count_itemsize(layout.dtype)
                yield SharedSlice(name, box, whole, ranks, ranks[number], step)


def _choose_reader(bytes_of: Sequence[int], turn: int) -> int:
    """Return the index of the rank with the fewest bytes to read; `turn` breaks ties, as it does for writers."""
    return min(range(len(bytes_of)), key=lambda number: (bytes_of[number], (number - turn) % len(bytes_of)))


def _split_rows(box: Box, chunk: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Yield slices of a box that end at chunk boundaries, so that no chunk is read twice."""
    if not box.shape:
        yield box
        return
    row = max(1, box.size // box.shape[0] * itemsize)
    side = max(1, SLICE // (row * chunk[0])) * chunk[0]
    start, end = box.offset[0], box.offset[0] + box.shape[0]
    while start < end:
        stop = min(end, (start // side + 1) * side)
        yield Box((start, *box.offset[1:]), (stop - start, *box.shape[1:]))
        start = stop


def agree_to_share(agreement: Agreement, registry: Registry, boxes: Collection[tuple[str, Box]], far: bool) -> bool:
    """Return whether all ranks share the load: each has a remote store (`far`) and loads all its boxes in the registry.

    boxes: (array, box) of each shard to fill. All ranks must call this. (Sampling loads the weights alone, and a test
    may load any boxes.)
    """
    if agreement.world == 1 or registry.mesh.world != agreement.world or not dist.is_initialized():
        return False
    agreement.count("do not share", int(not (far and _loads_everything(registry, agreement.rank, boxes))))
    agreement.count("asked to share", 1)
    agreement.wait_for_all("asked to share")
    return agreement.count("do not share", 0) == 0


def _loads_everything(registry: Registry, rank: int, boxes: Collection[tuple[str, Box]]) -> bool:
    return all((name, box) in boxes for name in registry for box, _ in registry.list_rank_boxes(name, rank) if box.size)


class SharedLoad:
    """One load that several ranks share."""

    def __init__(self, meta: Meta, registry: Registry, rank: int, targets: Sequence[Target]) -> None:
        self.rank = rank
        self._targets = _map_by_box(targets)
        self._parts = [*split_shared(meta, registry, rank)]
        shared_boxes = {(part.name, part.whole) for part in self._parts}
        self._own = [target for target in targets if (target.name, target.box) not in shared_boxes]

    def list_targets(self) -> list[Target]:
        """Return the targets that this rank reads from the store."""
        return self._own + [self._cut(part) for part in self._parts if part.reader == self.rank]

    def exchange(self) -> None:
        """Send the slices that this rank read to their other holders, and receive the rest. Call it after all reads."""
        for _, step in groupby(self._parts, key=lambda part: part.step):
            received: list[tuple[np.ndarray, np.ndarray]] = []
            work: list[dist.P2POp] = []
            for part in step:
                memory = self._cut(part).array
                if part.reader == self.rank:
                    buffer = _view_bytes(np.ascontiguousarray(memory))
                    work += [dist.P2POp(dist.isend, buffer, rank) for rank in part.ranks if rank != self.rank]
                else:
                    whole = memory if memory.flags.c_contiguous else np.empty_like(memory, order="C")
                    work.append(dist.P2POp(dist.irecv, _view_bytes(whole), part.reader))
                    received += [] if whole is memory else [(memory, whole)]
            for one in dist.batch_isend_irecv(work) if work else ():
                one.wait()
            for memory, whole in received:
                memory[...] = whole

    def _cut(self, part: SharedSlice) -> Target:
        target = self._targets[part.name, part.whole]
        place: Any = (*part.box.slice_within(part.whole), ...)
        return replace(target, box=part.box, array=target.array[place])


def _map_by_box(targets: Sequence[Target]) -> Mapping[tuple[str, Box], Target]:
    return {(target.name, target.box): target for target in targets}


def _view_bytes(array: np.ndarray) -> torch.Tensor:
    """Return the memory of an array as bytes, without a copy and whatever its dtype."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))
