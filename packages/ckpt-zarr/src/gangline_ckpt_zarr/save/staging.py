"""Staging memory on the host: a rank's file byte for byte, into which the writer process writes the checksums.

Unless an earlier save still runs, a save blocks the step only for the copy to this memory. The memory is shared with
the writer process and reused by the next save, because fresh pages cost more than the copy.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable
from dataclasses import replace

import torch

from gangline.shard import Shard
from gangline_ckpt_zarr.format.chunks import ChunkRun, RankFile
from gangline_ckpt_zarr.format.dtypes import map_dtype
from gangline_ckpt_zarr.format.views import make_views
from gangline_ckpt_zarr.pinned import pin, release

SCRATCH = 1 << 28  # bytes of GPU memory in which chunks are assembled before they are transferred
Place = tuple[tuple[slice, ...], torch.Tensor]  # (part of a box, view of its bytes in the buffer)


class Staging:
    """Buffer of anonymous shared memory, or of a new file on tmpfs if `path` names one."""

    def __init__(self, path: str | None = None) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        self.path = path or ""
        self.fd = os.memfd_create("gangline-staging") if path is None else os.open(path, flags, 0o600)
        self.size = 0
        self._file: RankFile | None = None
        self._places: list[tuple[ChunkRun, list[Place]]] = []
        self._stream: torch.cuda.Stream | None = None
        self._pinned = self._pageable = False  # pageable: pinning has failed

    def prepare(self, file: RankFile, gpu: int | None = None) -> None:
        """Allocate the memory for `file` and touch every page of it, while other threads run. Raises OSError.

        gpu: index of the GPU for which the memory is also pinned, which becomes the thread's current GPU.
        """
        fresh = file.size > self.size
        self._fit(file)
        if fresh:
            self._bytes[:: mmap.PAGESIZE].zero_()
        if gpu is not None:
            torch.cuda.set_device(gpu)  # in a new thread CUDA would otherwise open a context on GPU 0
            self._pin()

    def fill(self, file: RankFile, shards: Iterable[Shard]) -> None:
        """Copy the shards to their offsets in `file`. Raises OSError if the host or a GPU has too little memory."""
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
        self._stream.wait_stream(torch.cuda.current_stream(gpu))  # wait for the optimizer's last kernels
        try:
            with torch.cuda.stream(self._stream):
                self._copy_chunks(local, gpu)
        except torch.OutOfMemoryError as error:
            raise OSError(
                errno.ENOMEM, f"out of memory on {gpu} while chunks of a save are assembled: {error}"
            ) from error
        finally:
            self._stream.synchronize()

    def _copy(self, local: dict[tuple[str, tuple[int, ...]], torch.Tensor]) -> None:
        for run, places in self._places:
            _copy_to(_get_source(local, run), places)

    def _copy_chunks(
        self, local: dict[tuple[str, tuple[int, ...]], torch.Tensor], device: torch.device, limit: int = SCRATCH
    ) -> None:
        """Copy shards from a GPU: chunks are assembled on the GPU as in the file, and then transferred.

        A direct copy to rows of a wider buffer would go through pageable memory, even if the buffer is pinned. It would
        have a quarter of the speed, and might not be complete when the stream is synchronized. Zeros between chunks
        reserve the bytes of the checksums.
        """
        assert self._file is not None
        scratch = torch.empty(0, dtype=torch.uint8, device=device)
        for run, places in self._places:
            source, dtype = _get_source(local, run), getattr(torch, map_dtype(self._file.dtypes[run.name]))
            if source.device != device:  # offloaded to the host
                _copy_to(source, places)
                continue
            for part in run.split(limit):
                size = part.count * part.stride
                if size > scratch.numel():
                    scratch = torch.empty(size, dtype=torch.uint8, device=device)
                together = scratch[:size].zero_().view(dtype)
                start = tuple(at - first for at, first in zip(part.box.offset, run.box.offset, strict=True))
                for view in make_views(replace(part, base=0), together.itemsize):
                    slices = tuple(slice(at + s.start, at + s.stop) for at, s in zip(start, view.slices, strict=True))
                    into = together.as_strided(view.sizes, view.strides, view.offset)
                    into.copy_(source[slices].reshape(into.shape))
                self._send(scratch[:size], self._bytes[part.base : part.base + size])

    def _send(self, together: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(together, non_blocking=self._pinned)

    def _fit(self, file: RankFile) -> None:
        if file.size > self.size:
            # Raises OSError if memory or tmpfs is full. Without it, a later write would kill the process by SIGBUS.
            os.posix_fallocate(self.fd, 0, file.size)
            self._release()
            self._bytes = torch.frombuffer(mmap.mmap(self.fd, file.size), dtype=torch.uint8)
            self.size, self._pageable = file.size, False
        self._places = [(run, [*self._of(run, file.dtypes[run.name])]) for run in file.runs]
        self._file = file

    def _of(self, run: ChunkRun, dtype: str) -> Iterable[Place]:
        elements = self._bytes.view(getattr(torch, map_dtype(dtype)))
        for view in make_views(run, elements.itemsize):
            yield view.slices, elements.as_strided(view.sizes, view.strides, view.offset)

    def _pin(self) -> None:
        """Pin the buffer. After a failure it stays pageable, and copies are slower."""
        if not self._pinned and not self._pageable and self.size:
            self._pinned = pin(self._bytes)
            self._pageable = not self._pinned

    def _release(self) -> None:
        if self._pinned:
            release(self._bytes)
        self._pinned = False

    def close(self) -> None:
        """Free the memory."""
        self._release()
        self._places, self._file = [], None
        os.close(self.fd)


def _copy_to(source: torch.Tensor, places: Iterable[Place]) -> None:
    for slices, target in places:
        target.copy_(source[slices].reshape(target.shape))


def _get_source(local: dict[tuple[str, tuple[int, ...]], torch.Tensor], run: ChunkRun) -> torch.Tensor:
    source = local.get((run.name, run.box.offset))
    if source is None or tuple(source.shape) != run.box.shape:
        raise ValueError(f"the registry has a box of {run.name} at {run.box.offset}, but no shard has that box")
    return source
