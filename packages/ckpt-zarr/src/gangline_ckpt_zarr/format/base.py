"""Metadata of a checkpoint, packed or native, as zarr.json contains it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from gangline.shard import Registry
from gangline_ckpt_zarr.format import overlap
from gangline_ckpt_zarr.format.chunks import CheckpointFiles, ChunkRun
from gangline_ckpt_zarr.format.dtypes import count_itemsize
from gangline_ckpt_zarr.format.owners import get_box_owners


@dataclass(frozen=True)
class Meta(ABC):
    """Metadata of a checkpoint: JSON document of the run, layouts of arrays, file and offset of each chunk.

    `write_id`: 8 hex digits, different for each save.
    """

    document: dict[str, Any]
    registry: Registry
    files: CheckpointFiles
    write_id: str

    @abstractmethod
    def get_file_path(self, rank: int) -> str:
        """Return the path of a rank's file in the checkpoint's directory."""

    @property
    @abstractmethod
    def trailer(self) -> int:
        """Number of bytes after each chunk: its checksum, and its seal if it has one."""

    @abstractmethod
    def compute_seal_start(self, run: ChunkRun) -> int | None:
        """Return the start value of the seals of a chunk run; None if its chunks have no seals."""

    @abstractmethod
    def find_chunk_error(self, run: ChunkRun, number: int, checksum: int, trailer: bytes | memoryview) -> str:
        """Return why a chunk of a chunk run is bad, "" if it is good. `checksum`: computed from the chunk's bytes."""

    @abstractmethod
    def build_nodes(self) -> dict[str, dict[str, Any]]:
        """Return the zarr v3 metadata of every array, by name."""

    def iterate_writers(self) -> Iterator[int]:
        """Yield each rank that has a file, once. Loops over layouts, because most ranks may have no file."""
        writers, cut = set[int](), set()
        for layout in self.registry.layouts.values():
            owners = get_box_owners(self.registry.mesh, layout)
            if (owners, layout.turn) in cut:
                continue
            cut.add((owners, layout.turn))
            for rank in overlap.iterate_writers(owners, layout.turn):
                if rank not in writers:
                    writers.add(rank)
                    yield rank

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes of all arrays in their stored dtypes, without padding and trailers."""
        return sum(prod(layout.shape) * count_itemsize(layout.dtype) for layout in self.registry.layouts.values())

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: layout.shape for name, layout in self.registry.layouts.items()}
