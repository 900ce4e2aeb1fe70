"""Staging buffers of a rank, and the offset of each chunk in them.

A buffer belongs to the memory tier if the run has one; otherwise the writer process inherits the buffer. Allocating
fresh memory costs several times the copy into it, so a thread prepares the first buffer during the first steps. On a
GPU the thread also pins the buffer, which takes seconds.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import torch

from gangline_ckpt_zarr.errors import describe_error
from gangline_ckpt_zarr.format.packed import PackedFiles
from gangline_ckpt_zarr.save.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gangline.shard import Registry, Shard
    from gangline_ckpt_zarr.format.chunks import RankFile
    from gangline_ckpt_zarr.save.writer.client import WriterClient
    from gangline_ckpt_zarr.tiers.memory import MemoryTier


class Buffers:
    """Staging buffers of one rank, used by one save at a time."""

    def __init__(self, memory: MemoryTier | None, writer: WriterClient) -> None:
        self._memory, self._writer = memory, writer
        self._own: Staging | None = None
        self._files: PackedFiles | None = None
        self._preparing: threading.Thread | None = None
        self._prepared: Staging | None = None
        self.no_memory = ""  # reason why this rank's newest save is not staged in the memory tier; "": it is staged

    def prepare(self, registry: Registry, rank: int) -> None:
        """Start a thread that prepares files and memory for the first save, and return at once."""
        if self._files is None and self._preparing is None:
            gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            arguments = registry, rank, gpu
            self._preparing = threading.Thread(target=self._prepare, args=arguments, daemon=True, name="prepare")
            self._preparing.start()

    def get_files(self, registry: Registry) -> PackedFiles:
        """Return the ranks' files, with the offset of each chunk; one object for equal registries."""
        self._join()
        if self._files is None or self._files.registry != registry:
            self._files = PackedFiles(registry)
        return self._files

    def stage(self, rank: int, file: RankFile, shards: Sequence[Shard]) -> Staging:
        """Return a buffer that holds the shards as `file`. Raises OSError if there is no memory for it.

        If the memory tier has no space, the buffer belongs to this process, and `no_memory` is the reason.
        """
        self._join()
        prepared, self._prepared, self.no_memory = self._prepared, None, ""
        if self._memory is not None:
            self.no_memory = self._memory.left_out
            if not self.no_memory:
                try:
                    staging = prepared or self._memory.get_buffer(rank)
                    staging.fill(file, shards)
                    return staging
                except OSError as error:
                    self.no_memory = self._memory.explain_no_room(describe_error(error), file.size)
        staging = self._get_own_buffer()
        staging.fill(file, shards)
        return staging

    def close(self) -> None:
        """Free this process's own buffer; the memory tier frees its buffers itself."""
        self._join()
        if self._own is not None:
            self._own.close()
            self._own = None

    def _prepare(self, registry: Registry, rank: int, gpu: int | None) -> None:
        self._files = PackedFiles(registry)
        with contextlib.suppress(OSError):  # the first save reports the error
            staging = self._find(rank)
            staging.prepare(self._files.get_rank_file(rank), gpu)
            self._prepared = staging

    def _find(self, rank: int) -> Staging:
        return self._get_own_buffer() if self._memory is None else self._memory.get_buffer(rank)

    def _get_own_buffer(self) -> Staging:
        if self._own is None:
            self._own = Staging()
            self._writer.start([self._own.fd])
        return self._own

    def _join(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
