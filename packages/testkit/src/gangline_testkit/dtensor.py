"""Conversion between torch's DTensor and `Shard`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard as OnDim
from torch.distributed.tensor.placement_types import Placement

from gangline.shard import Shard


def to_shard(name: str, tensor: DTensor) -> Shard:
    """Return this rank's part of a DTensor as a Shard; writing into the Shard writes into the DTensor.

    Primary is the first replica along each mesh dim that does not shard the array. Raises ValueError on a rank outside
    the mesh, and for placements that are not a box (partial sums, strided shards).
    """
    device_mesh = tensor.device_mesh
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{name}: this rank is not on the DTensor's mesh")
    offset, shape, primary = [0] * tensor.dim(), list(tensor.shape), True
    for size, index, placement in zip(device_mesh.shape, coordinate, tensor.placements, strict=True):
        if placement.is_replicate():
            primary = primary and index == 0
        elif type(placement) is OnDim:
            dim = placement.dim % tensor.dim()
            share = -(-shape[dim] // size)  # as torch.chunk: full shares first, the last one short or empty
            start = min(index * share, shape[dim])
            offset[dim], shape[dim] = offset[dim] + start, min(share, shape[dim] - start)
        else:
            raise ValueError(f"{name}: {placement} is no box of the array")
    local = tensor.to_local().detach()
    if list(local.shape) != shape:
        raise ValueError(f"{name}: the local tensor is {tuple(local.shape)}, its placements say {tuple(shape)}")
    return Shard(name, tuple(tensor.shape), tensor.dtype, tuple(offset), local, primary)


def to_dtensor(shard: Shard, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor over the shard's memory. Raises ValueError if the placements describe another box."""
    strides = torch.empty(shard.global_shape, device="meta").stride()
    tensor = DTensor.from_local(
        shard.local, device_mesh, placements, run_check=False, shape=torch.Size(shard.global_shape), stride=strides
    )
    if to_shard(shard.name, tensor).box != shard.box:
        raise ValueError(f"{shard.name}: {tuple(placements)} do not put {shard.box} on this rank")
    return tensor
