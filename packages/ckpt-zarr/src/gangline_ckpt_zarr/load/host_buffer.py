"""Host memory of a load: shards are filled in groups, through one buffer that is pinned if a shard is on a GPU."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

import torch

from gangline.shard import Box, Shard
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.load.read_plan import Target
from gangline_ckpt_zarr.pinned import pin, release

GROUP_BYTES = 1 << 30  # maximum size of the buffer: the hosts of a node's ranks have memory for several models at most
ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class ShardPart:
    """Rows of a shard: the tensor to fill, its box in the array, and the dtype in which it is read."""

    name: str
    box: Box
    local: torch.Tensor
    dtype: torch.dtype

    @property
    def is_direct(self) -> bool:
        """Whether the file is read straight into the shard's own memory."""
        return self.local.is_cpu and self.local.dtype == self.dtype

    @property
    def nbytes(self) -> int:
        """Size in the buffer, in bytes."""
        size = 0 if self.is_direct else self.box.size * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT

    def split(self, limit: int) -> Iterator[ShardPart]:
        """Yield parts of at most `limit` bytes, or of one row if a row is larger."""
        if self.nbytes <= limit or not self.box.shape:
            yield self
            return
        (first, *offset), (rows, *shape) = self.box.offset, self.box.shape
        step = max(1, (limit - ALIGNMENT) // (prod(shape) * self.dtype.itemsize))
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            yield replace(self, box=Box((first + start, *offset), (stop - start, *shape)), local=self.local[start:stop])


class HostBuffer:
    """Buffer of a load. limit: maximum size in bytes; None: one group for all shards, in pageable memory."""

    def __init__(self, shards: Sequence[Shard], meta: Meta, limit: int | None) -> None:
        complete = (ShardPart(s.name, s.box, s.local.detach(), _choose_dtype(s, meta)) for s in shards)
        self._groups: list[list[ShardPart]] = [[]]
        self._size, used = 0, 0
        for part in complete if limit is None else chain.from_iterable(part.split(limit) for part in complete):
            if limit is not None and used and used + part.nbytes > limit:
                self._groups.append([])
                used = 0
            self._groups[-1].append(part)
            used += part.nbytes
            self._size = max(self._size, used)
        gpu = any(part.local.is_cuda for group in self._groups for part in group)
        self._pins = gpu and limit is not None

    @contextmanager
    def open_groups(self) -> Iterator[Iterator[HostGroup]]:
        """Allocate the buffer, and enter a block with an iterator of groups, each valid until the next."""
        memory = torch.empty(0, dtype=torch.uint8)
        if self._size:
            memory = torch.frombuffer(mmap.mmap(-1, self._size), dtype=torch.uint8)
        pinned = self._pins and bool(self._size) and pin(memory)
        try:
            yield (HostGroup(group, memory, pinned) for group in self._groups)
        finally:
            if pinned:
                release(memory)


class HostGroup:
    """Parts of shards that are in the buffer together. targets: what to read, in the order of the parts."""

    def __init__(self, parts: Sequence[ShardPart], memory: torch.Tensor, pinned: bool) -> None:
        self.targets: list[Target] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pinned = pinned
        start = 0
        for part in parts:
            local = part.local
            if not part.is_direct:
                size = part.box.size * part.dtype.itemsize
                local = memory[start : start + size].view(part.dtype).view(part.local.shape)
                self._copies.append((part.local, local))
                start += part.nbytes
            bits = part.dtype is torch.bfloat16
            self.targets.append(
                Target(part.name, part.box, (local.view(torch.int16) if bits else local).numpy(), bits=bits)
            )

    def copy(self) -> None:
        """Copy the buffer to the shards that were not read directly, and wait until the buffer may be reused."""
        for local, memory in self._copies:
            local.copy_(memory, non_blocking=self._pinned)
        if self._pinned:
            for device in {local.device for local, _ in self._copies if local.is_cuda}:
                torch.cuda.current_stream(device).synchronize()


def _choose_dtype(shard: Shard, meta: Meta) -> torch.dtype:
    """Return the dtype to read: float8 is stored as float32, which represents every float8 value."""
    stored: torch.dtype = getattr(torch, meta.registry[shard.name].dtype)
    return torch.float32 if stored.is_floating_point and stored.itemsize == 1 else stored
