"""Host memory that holds what a rank writes, byte for byte as in its file; the writer process fills in the checksums.

Saving blocks the step for this copy and nothing else. The memory is shared with the writer process and kept from one
save to the next, for fresh pages cost more than the copy.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable

import torch

from gangline.checkpoint import Shard
from gangline_ckpt_zarr.format.chunks import ChunkRun, RankFile
from gangline_ckpt_zarr.format.grid import stored_dtype
from gangline_ckpt_zarr.format.views import views

Place = tuple[tuple[slice, ...], torch.Tensor]  # a part of a box, and where in the buffer it goes


class Staging:
    """A buffer of anonymous shared memory, or of a new file on tmpfs where `path` names one."""

    def __init__(self, path: str | None = None) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        self.path = path or ""
        self.fd = os.memfd_create("gangline-staging") if path is None else os.open(path, flags, 0o600)
        self.size = 0
        self._file: RankFile | None = None
        self._places: list[tuple[ChunkRun, list[Place]]] = []
        self._stream: torch.cuda.Stream | None = None
        self._pinned = False

    def prepare(self, file: RankFile) -> None:
        """Have the memory for `file` at hand, every page of it, and let other threads run. Raises OSError."""
        fresh = file.size > self.size
        self._fit(file)
        if fresh:
            self._bytes[:: mmap.PAGESIZE].zero_()

    def fill(self, file: RankFile, shards: Iterable[Shard]) -> None:
        """Copy the shards to where they lie in `file`. Raises OSError where there is no memory for it."""
        if file is not self._file:
            self._fit(file)
        local = {(shard.name, shard.offset): shard.local.detach() for shard in shards if shard.primary}
        gpu = next((tensor.device for tensor in local.values() if tensor.is_cuda), None)
        if gpu is None:
            self._copy(local)
            return
        self._pin()
        if self._stream is None:
            self._stream = torch.cuda.Stream(gpu)
        self._stream.wait_stream(torch.cuda.current_stream(gpu))  # the optimizer's last kernels
        with torch.cuda.stream(self._stream):
            self._copy(local)
        self._stream.synchronize()

    def _copy(self, local: dict[tuple[str, tuple[int, ...]], torch.Tensor]) -> None:
        for run, places in self._places:
            source = local.get((run.name, run.box.offset))
            if source is None or tuple(source.shape) != run.box.shape:
                raise ValueError(f"the registry knows a box of {run.name} at {run.box.offset} that no shard holds")
            for slices, target in places:
                target.copy_(source[slices].reshape(target.shape), non_blocking=self._pinned)

    def _fit(self, file: RankFile) -> None:
        if file.size > self.size:
            os.posix_fallocate(self.fd, 0, file.size)  # raises where there is no room; touching a page would kill
            self._bytes = torch.frombuffer(mmap.mmap(self.fd, file.size), dtype=torch.uint8)
            self.size, self._pinned = file.size, False
        self._places = [(run, [*self._of(run, file.dtypes[run.name])]) for run in file.runs]
        self._file = file

    def _of(self, run: ChunkRun, dtype: str) -> Iterable[Place]:
        elements = self._bytes.view(getattr(torch, stored_dtype(dtype)))
        for view in views(run, elements.itemsize):
            yield view.slices, elements.as_strided(view.sizes, view.strides, view.offset)

    def _pin(self) -> None:
        """Page-lock the buffer, so that copies from a GPU go at full speed and beside the kernels."""
        if not self._pinned and self.size:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self.size, 0))
            self._pinned = True

    def close(self) -> None:
        """Give the memory back."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._places, self._file = [], None
        os.close(self.fd)
