"""State of a gradient reduction between steps (error feedback): arrays, saved as `local/...` arrays of a checkpoint.

Each array of a bucket is stacked over the ranks that have the bucket, in rank order: one row for each rank.
If the arrays of a bucket differ in shape between ranks, every row is flat and as long as the longest array.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from types import MappingProxyType
from zlib import crc32

from torch import Tensor

from gangline.gradients import BucketLayout, GradientReduction
from gangline.mesh import Mesh
from gangline.shard import Division, Layout, Registry, Shard


class ReductionState:
    """Arrays that the reduction stores for one bucket on this rank.

    buckets  the bucket's distinct layouts on all ranks that have the bucket; a row has room for the arrays of each
    own      layout of the bucket on this rank, one of `buckets`
    like     tensor with the dtype and the device of the arrays
    """

    def __init__(
        self, reduction: GradientReduction, buckets: Iterable[BucketLayout], own: BucketLayout, like: Tensor
    ) -> None:
        self.label = hash_buckets(buckets := list(buckets))
        self.rows = {name: like.new_zeros(shape) for name, shape in get_row_shapes(reduction, buckets).items()}
        shapes = reduction.get_array_shapes(own)
        self.views = MappingProxyType(
            {
                name: self.rows[name].view(-1)[: prod(shape)].view(shape) if prod(shape) else like.new_zeros(shape)
                for name, shape in shapes.items()
            }
        )


def get_row_shapes(reduction: GradientReduction, buckets: Iterable[BucketLayout]) -> dict[str, tuple[int, ...]]:
    """Return array name -> shape of one rank's row."""
    shapes: dict[str, tuple[int, ...]] = {}
    for bucket in buckets:
        for name, shape in reduction.get_array_shapes(bucket).items():
            other = shapes.setdefault(name, tuple(shape))
            if other != tuple(shape):
                shapes[name] = (max(prod(other), prod(shape)),)
    return {name: shape for name, shape in shapes.items() if prod(shape)}


def hash_buckets(buckets: Iterable[BucketLayout]) -> str:
    """Return a hash of a bucket's layouts on all ranks that have the bucket."""
    return f"{crc32(repr(tuple(buckets)).encode()):08x}"


def name_array(reduction: GradientReduction, mesh: Mesh, bucket: str, label: str, array: str) -> str:
    """Return the name of an array that the reduction stores.

    The name contains the reduction, the mesh and the hash of the bucket, because the array is valid only for these.
    """
    ranks = "-".join(f"{axis}{size}" for axis, size in mesh.sizes)
    return f"local/gradients/{reduction.name}/{ranks}/{bucket}-{label}/{array}"


def iterate_layouts(
    reduction: GradientReduction,
    mesh: Mesh,
    bucket: str,
    buckets: Iterable[BucketLayout],
    dtype: str,
    at: Sequence[tuple[str, int]] = (),
) -> Iterator[tuple[str, Layout]]:
    """Yield (name, layout) of the arrays that all ranks with a bucket store for it.

    at: mesh coordinates of the ranks with the bucket (a pipeline stage); along all other axes every rank has a row.
    """
    axes = tuple(axis for axis in mesh.axes if axis not in dict(at))
    ranks = mesh.size(*axes)
    divisions = (Division(axes, (tuple(range(ranks + 1)),)),) if ranks > 1 else ()
    label = hash_buckets(buckets := list(buckets))
    for array, shape in get_row_shapes(reduction, buckets).items():
        yield name_array(reduction, mesh, bucket, label, array), Layout((ranks, *shape), dtype, divisions, tuple(at))


def iterate_shards(
    reduction: GradientReduction, registry: Registry, rank: int, bucket: str, state: ReductionState
) -> Iterator[Shard]:
    """Yield this rank's rows of the arrays stored for a bucket."""
    for array, tensor in state.rows.items():
        name = name_array(reduction, registry.mesh, bucket, state.label, array)
        ((box, primary),) = registry.list_rank_boxes(name, rank)
        yield Shard(name, registry[name].shape, tensor.dtype, box.offset, tensor[None], primary)
