"""Packed checkpoint, as a run saves it: one file per rank, with the rank's chunks in sequence, each with a seal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from threading import local
from typing import Any, final

from gangline.shard import Box, Layout, Registry
from gangline_ckpt_zarr.format import checksum as sums, claims, cuts
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.checksum import TRAILER
from gangline_ckpt_zarr.format.chunks import CheckpointFiles, ChunkRun, RankFile, lay_out
from gangline_ckpt_zarr.format.nodes import FORMAT, build_array_node, encode_root
from gangline_ckpt_zarr.format.owners import BoxOwners, get_box_owners

_seen = local()


@final
class PackedFiles(CheckpointFiles):
    """Files of a packed checkpoint. The file of a rank contains the rank's primary boxes, in the registry's order."""

    def _lay_out(self, rank: int) -> RankFile:
        return lay_out(self._iterate_boxes(rank))

    def _iterate_boxes(self, rank: int) -> Iterator[tuple[str, str, tuple[int, ...], Box]]:
        for name, layout, owners in self._arrays:
            for box in owners.list_written(rank, layout.turn):
                yield name, layout.dtype, self.chunk(name), box

    @cached_property
    def _arrays(self) -> list[tuple[str, Layout, BoxOwners]]:
        """Name, layout and owners of each array, looked up once for all ranks."""
        mesh = self.registry.mesh
        return [(name, layout, get_box_owners(mesh, layout)) for name, layout in self.registry.layouts.items()]


@final
@dataclass(frozen=True)
class PackedMeta(Meta):
    """Metadata of a packed checkpoint, in which every chunk has a seal."""

    def get_file_path(self, rank: int) -> str:
        return get_data_path(self.write_id, rank)

    @property
    def trailer(self) -> int:
        return TRAILER

    def compute_seal_start(self, run: ChunkRun) -> int:
        return sums.compute_seal_start(self.write_id, run.name, run.box.offset)

    def find_chunk_error(self, run: ChunkRun, number: int, checksum: int, trailer: bytes | memoryview) -> str:
        last = getattr(_seen, "last", None)  # the chunk run that this thread checked last, and its seal start
        if last is None or last[0] is not run or last[1] is not self:
            _seen.last = last = run, self, self.compute_seal_start(run)
        return sums.find_trailer_error(last[2], number, checksum, trailer)

    def build_nodes(self) -> dict[str, dict[str, Any]]:
        return _build_nodes(self.registry, self.files)


def get_data_path(write_id: str, rank: int) -> str:
    """Return the path of a rank's file in the checkpoint's directory."""
    return f"data-{write_id}/{rank:05d}.bin"


def write(registry: Registry, files: PackedFiles, document: dict[str, Any], write_id: str) -> bytes:
    """Return the content of zarr.json. Raises ValueError if it could not be read back."""
    cuts.check(registry)
    claims.check_depth(document)
    arrays = _build_nodes(registry, files)
    ours: dict[str, Any] = {
        "format": FORMAT,
        "document": document,
        "write_id": write_id,
        "layout": cuts.to_json(registry),
    }
    return encode_root(arrays, ours)


def read(ours: dict[str, Any], registry: Registry, arrays: dict[str, dict[str, Any]]) -> PackedMeta:
    """Parse the metadata in zarr.json. Raises ValueError, KeyError or TypeError if it is invalid."""
    chunks = {
        name: claims.chunk(node["chunk_grid"]["configuration"]["chunk_shape"], registry[name], name)
        for name, node in arrays.items()
    }
    return PackedMeta(ours["document"], registry, PackedFiles(registry, chunks), ours["write_id"])


def _build_nodes(registry: Registry, files: CheckpointFiles) -> dict[str, dict[str, Any]]:
    return {
        name: build_array_node(layout.shape, layout.dtype, files.chunk(name))
        for name, layout in registry.layouts.items()
    }
