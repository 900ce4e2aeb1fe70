"""Conversion between torch's DTensor and `Shard`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard as OnDim
from torch.distributed.tensor.placement_types import Placement

from gangline.shard import Shard


def to_shard(name: str, tensor: DTensor) -> Shard:
    """Return this rank's part of a DTensor as a Shard that shares its memory.

    The shard is primary on the first replica along each mesh dim that does not shard the array. Raises ValueError on a
    rank outside the mesh, and for placements that are not a box (partial sums, strided shards).
    """
    device_mesh = tensor.device_mesh
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{name}: this rank is not in the device mesh of the DTensor")
    offset, shape, primary = [0] * tensor.dim(), list(tensor.shape), True
    for size, index, placement in zip(device_mesh.shape, coordinate, tensor.placements, strict=True):
        if placement.is_replicate():
            primary = primary and index == 0
        elif type(placement) is OnDim:
            dim = placement.dim % tensor.dim()
            share = -(-shape[dim] // size)  # as in torch.chunk: full shares first; the last shares are short or empty
            start = min(index * share, shape[dim])
            offset[dim], shape[dim] = offset[dim] + start, min(share, shape[dim] - start)
        else:
            raise ValueError(
                f"{name}: the placement {placement} is not a box of the array (supported: Replicate, Shard)"
            )
    local = tensor.to_local().detach()
    if list(local.shape) != shape:
        raise ValueError(
            f"{name}: the local tensor has shape {tuple(local.shape)}, and its placements give {tuple(shape)}"
        )
    return Shard(name, tuple(tensor.shape), tensor.dtype, tuple(offset), local, primary)


def to_dtensor(shard: Shard, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor that shares the shard's memory. Raises ValueError if the placements describe another box."""
    strides = torch.empty(shard.global_shape, device="meta").stride()
    tensor = DTensor.from_local(
        shard.local, device_mesh, placements, run_check=False, shape=torch.Size(shard.global_shape), stride=strides
    )
    if to_shard(shard.name, tensor).box != shard.box:
        raise ValueError(f"{shard.name}: the placements {tuple(placements)} do not give {shard.box} on this rank")
    return tensor
