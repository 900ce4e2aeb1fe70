"""Planners of torch.distributed.checkpoint for shards: which boxes a rank writes, and which stored boxes it reads.

DCP describes a tensor as a list of chunks (offset, sizes) of a global shape. A `Shard` has the same fields, so the
planners need no DTensor. A requested box may overlap any number of stored boxes.
"""

from __future__ import annotations

import dataclasses
import io
from collections import defaultdict
from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from gangline.errors import BadCheckpoint, UserError
from gangline.shard import Registry, Shard


class ShardSavePlanner(SavePlanner):
    """Planner that writes this rank's primary boxes; rank 0 checks that the boxes of all ranks tile every array."""

    def __init__(self, shards: Iterable[Shard], registry: Registry) -> None:
        self.local = {
            MetadataIndex(shard.name, shard.offset): shard
            for shard in shards
            if shard.primary and shard.local.numel() > 0
        }
        self.registry = registry

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False) -> None:
        """Ignore the state dict: the shards were passed to `__init__`."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(index, shard) for index, shard in self.local.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the save plans of all ranks and the table of chunks.

        Raises ValueError for shards that the registry does not list, or that do not tile their array.
        """
        plans, metadata = create_default_global_save_plan(all_plans)
        arrays = get_arrays(metadata)
        for name in self.registry:
            shape, dtype = self.registry[name].shape, getattr(torch, self.registry[name].dtype)
            if prod(shape) == 0:
                arrays[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [])
            _check_tiling(name, shape, arrays.get(name))
        strangers = [name for name in arrays if name not in self.registry]
        if strangers:
            raise ValueError(f"shards of arrays that the registry does not list: {', '.join(strangers[:3])}")
        # DCP's own tools (dcp_to_torch_save) need the path of each array in a nested state dict.
        paths = {name: (name,) for name in arrays}
        return plans, dataclasses.replace(metadata, state_dict_metadata={**arrays}, planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.local[write_item.index].local.detach()


def get_arrays(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the stored arrays by name."""
    entries = metadata.state_dict_metadata
    return {name: array for name, array in entries.items() if isinstance(array, TensorStorageMetadata)}


def _write_item(index: MetadataIndex, shard: Shard) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(shard.offset), shard.local.shape)
    data = TensorWriteData(chunk, TensorProperties(shard.dtype), torch.Size(shard.global_shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _check_tiling(name: str, shape: tuple[int, ...], stored: TensorStorageMetadata | None) -> None:
    """Raise ValueError if the primary boxes omit or repeat a part of the array."""
    chunks = [] if stored is None else stored.chunks
    if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape) or len({c.offsets for c in chunks}) != len(chunks):
        raise ValueError(f"the primary shards of {name} do not tile the array of shape {shape}: {chunks}")


class ShardLoadPlanner(LoadPlanner):
    """Planner that fills the given shards in place."""

    def __init__(self, shards: Iterable[Shard], directory: Path) -> None:
        self.local: dict[str, list[Shard]] = defaultdict(list)
        for shard in shards:
            if shard.local.numel() > 0:
                self.local[shard.name].append(shard)
        self.directory = directory

    def set_up_planner(self, state_dict, metadata: Metadata | None = None, is_coordinator=False) -> None:
        assert metadata is not None
        self.stored = get_arrays(metadata)

    def create_local_plan(self) -> LoadPlan:
        """Return the load plan of this rank.

        Raises UserError if the checkpoint lacks an array, or stores it with another shape or an incompatible dtype;
        BadCheckpoint if the stored boxes do not cover a shard.
        """
        missing = [name for name in self.local if name not in self.stored]
        if missing:
            raise UserError(
                f"checkpoint {self.directory.name} lacks arrays of this run: {', '.join(missing[:3])}"
                + (f" and {len(missing) - 3} more arrays." if len(missing) > 3 else "."),
                f"The checkpoint holds {len(self.stored)} arrays: {', '.join(list(self.stored)[:3])}, ...",
            )
        return LoadPlan([item for name, shards in self.local.items() for item in self._read_items(name, shards)])

    def _read_items(self, name: str, shards: list[Shard]) -> list[ReadItem]:
        array = self.stored[name]
        for shard in shards:
            if tuple(array.size) != tuple(shard.global_shape):
                raise UserError(
                    f"{name} has shape {tuple(array.size)} in checkpoint {self.directory.name}, "
                    f"and {tuple(shard.global_shape)} in this run."
                )
            dtype = array.properties.dtype
            if dtype != shard.dtype and not (dtype.is_floating_point and shard.dtype.is_floating_point):
                raise UserError(
                    f"{name} is {dtype} in checkpoint {self.directory.name}, and {shard.dtype} in this run."
                )
        chunks = [ChunkStorageMetadata(torch.Size(shard.offset), shard.local.shape) for shard in shards]
        items = create_read_items_for_chunk_list(name, array, chunks)
        if sum(prod(item.lengths) for item in items) != sum(prod(chunk.sizes) for chunk in chunks):
            raise BadCheckpoint(name, None, self.directory, "the stored boxes do not cover the array")
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Ignore the call, because DCP stores only tensors here; everything else is in document.json."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        assert index.index is not None
        place = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self.local[index.fqn][index.index].local.detach()[tuple(slice(a, a + n) for a, n in place)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Ignore the call, because the tensor is a view of the shard."""
