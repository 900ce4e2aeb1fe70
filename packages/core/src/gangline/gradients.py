"""Gradient reduction over data-parallel ranks: the contract of the parts of the group `gradients`.

A strategy packs the gradients of several parameters into one flat buffer, a bucket. During the backward pass it
calls `reduce` or `reduce_scatter` with each complete bucket, and waits for the returned sums before it measures the
gradient norm. Torch-free at import.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gangline.comm.base import Comm, Pending


@dataclass(frozen=True)
class GradientSlot:
    """One parameter in a bucket, or the rows of one parameter that are in the bucket."""

    name: str  # name of the parameter, equal under every layout: "blocks.0.attention.query.weight"
    offset: int  # index of the slot's first element in the bucket
    # (rows, columns) for a parameter of two or more dims, leading dims flattened; (size,) for a parameter of one dim,
    # and for a piece of a parameter that ends inside a row. Under tp: the shape of this rank's shard
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, offset: int, shape: Sequence[int]) -> GradientSlot:
        """Return the slot of a complete parameter of this shape."""
        return cls(name, offset, (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (prod(shape),))

    @property
    def size(self) -> int:
        """Number of elements of the slot."""
        return prod(self.shape)


@dataclass(frozen=True)
class BucketLayout:
    """Layout of a bucket, fixed before the first step: equal in all steps and on all ranks that sum the bucket."""

    size: int  # number of elements; elements outside all slots are padding and zero
    slots: tuple[GradientSlot, ...]  # slots of the bucket's parameters, at least one, in order of offset
    ranks: int  # number of ranks that sum the bucket
    scatters: bool = False  # whether `reduce_scatter` sums the bucket instead of `reduce`


@dataclass(frozen=True, eq=False)
class Bucket:
    """One bucket of gradients on this rank, complete and ready to be summed."""

    layout: BucketLayout  # the bucket's layout
    # (size,) this rank's gradients, in the precision's `reduce_dtype`; the reduction may overwrite them. Under
    # `precision=fp16` they are multiplied by the loss scale, and contain inf or nan in a step that overflows: the sum
    # must then contain inf or nan too, or the step is not skipped
    flat: torch.Tensor
    # arrays by name from `GradientReduction.get_array_shapes`, to be changed in place: in the dtype and on the device
    # of `flat`, zero before the first step and if a checkpoint has no arrays for this layout
    state: Mapping[str, torch.Tensor]
    step: int  # number of the step, from 0: `StepRecord.step` - 1. Counts on after a resume, so a warm-up is `step < n`
    # number of earlier sums of this bucket in this step; more than 0 only with zero=2 or 3, which sum after each
    # microbatch, each time after the previous sum has arrived
    earlier_sums: int = 0

    def view(self, slot: GradientSlot) -> torch.Tensor:
        """Return the gradient of one slot, in the slot's shape: a view of `flat`."""
        return self.flat[slot.offset : slot.offset + slot.size].view(slot.shape)


class GradientReduction(ABC):
    """Contract of a gradient reduction, which sums buckets over data-parallel ranks. `build(config, run)` makes it.

    Every rank of a `comm` calls the methods for the same buckets in the same order, from the thread that runs the
    step and without autograd. The sums must be bitwise equal on all ranks of the `comm`, or the weights of the
    replicas diverge. Keep state between steps in `bucket.state`, so that a run resumed under the same layout
    continues bit for bit. Draw random numbers from a `torch.Generator` whose seed is a hash of the run's seed,
    `bucket.step`, `bucket.earlier_sums`, the slots' names and, if ranks draw different numbers, `comm.index`.
    """

    name: str = ""  # name of the part, "<distribution>/<part>": set by core, which wraps the result of `build`

    def get_array_shapes(self, layout: BucketLayout) -> Mapping[str, tuple[int, ...]]:
        """Return name -> shape of each array that this rank keeps for a bucket between steps: an error, a basis.

        A pure function of `layout`, because core calls it for buckets of other ranks too. Names consist of letters,
        digits and ``_.-``. Checkpoints store the arrays as `local/gradients/...`, under the names of the part and of
        the array, for one layout of ranks and buckets: under another layout they start from zero.
        `GradientsConfig.count_state` must count the same elements. Change the arrays in place: an array put into
        `bucket.state` would not be saved.
        """
        return {}

    @abstractmethod
    def reduce(self, bucket: Bucket, comm: Comm) -> Pending[torch.Tensor]:
        """Start to sum a bucket over the ranks of `comm`, instead of `comm.start_all_reduce(bucket.flat)`.

        Returns the (size,) sum, not divided by the number of ranks, as a `Pending`, in the dtype of `bucket.flat` and
        possibly in its memory. The method may start other collectives, which overlap with the backward pass. Work on
        their results, further collectives included, goes into a `gangline.comm.ordered.Later`: it runs when the bucket
        is waited for, in the same order on all ranks. `comm` has more than one rank.
        """

    def reduce_scatter(self, bucket: Bucket, comm: Comm) -> Pending[torch.Tensor]:
        """Start to sum a bucket of `n = comm.size` equal ranges, of which this rank needs only range `comm.index`.

        Returns this rank's range of the sum, (size / n,). Strategies that shard the optimizer state (ZeRO) call this
        method instead of `reduce`. By default it returns a slice of the sum from `reduce`, which is correct but
        communicates twice as much as needed.
        """
        from gangline.comm.ordered import Later

        length = bucket.layout.size // comm.size
        own = slice(comm.index * length, (comm.index + 1) * length)
        return Later(self.reduce(bucket, comm), lambda total: total[own])


class CheckedReduction(GradientReduction):
    """Wrapper of a part's reduction that checks the part's arrays and sums; its errors name the part."""

    def __init__(self, name: str, inner: GradientReduction) -> None:
        self.name, self.inner = name, inner

    def get_array_shapes(self, layout: BucketLayout) -> Mapping[str, tuple[int, ...]]:
        """Return the array shapes of the part. Raises ValueError for an invalid name or shape."""
        shapes = {name: tuple(shape) for name, shape in self.inner.get_array_shapes(layout).items()}
        for name, shape in shapes.items():
            if not re.fullmatch(r"\w[\w.-]*", name) or not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"{self.name} stores an array with an invalid name or shape: {name!r}, {shape}")
        return shapes

    def reduce(self, bucket: Bucket, comm: Comm) -> Pending[torch.Tensor]:
        return self._check(bucket, self.inner.reduce(bucket, comm), bucket.layout.size)

    def reduce_scatter(self, bucket: Bucket, comm: Comm) -> Pending[torch.Tensor]:
        return self._check(bucket, self.inner.reduce_scatter(bucket, comm), bucket.layout.size // comm.size)

    def _check(self, bucket: Bucket, pending: Pending[torch.Tensor], size: int) -> Pending[torch.Tensor]:
        from gangline.comm.ordered import Later

        def check(total: torch.Tensor) -> torch.Tensor:
            signature = tuple(getattr(total, "shape", ())), getattr(total, "dtype", type(total))
            if signature != ((size,), bucket.flat.dtype):
                raise TypeError(f"{self.name} returned a sum {signature}, expected {(size,), bucket.flat.dtype}")
            return total

        if not hasattr(pending, "wait"):
            raise TypeError(f"{self.name} returned {type(pending).__name__} for a bucket instead of a `Pending`")
        return Later(pending, check)
