"""Buckets for the reduction of gradients over ranks; each is reduced as soon as its last gradient is computed.

Parameters fill buckets in reverse order, which is roughly the order of the backward pass. Buckets are sent in order, so
all ranks make the same calls. This follows PyTorch DDP (Li et al., VLDB 2020, section 3.2.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

import torch
from torch import Tensor, nn

from gangline.comm.base import Comm, Pending
from gangline.comm.purpose import mark_traffic
from gangline.gradients import Bucket, BucketLayout, GradientReduction, GradientSlot
from gangline.mesh import Mesh
from gangline.shard import Registry, Shard, name_dtype
from gangline_basics.parallel.reduction_state import ReductionState, iterate_layouts, iterate_shards


class GradientBucket:
    """One flat buffer, gradients that are views of the buffer, and the buffer's layout for the reduction."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: int, dtype: torch.dtype) -> None:
        self.parameters = list(parameters.values())
        sizes = [parameter.numel() for parameter in self.parameters]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=self.parameters[0].device)
        parts = self.flat.split(sizes)
        self.slots = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
        starts = accumulate(sizes, initial=0)
        slots = (GradientSlot.of(name, at, p.shape) for (name, p), at in zip(parameters.items(), starts, strict=False))
        self.layout = BucketLayout(sum(sizes), tuple(slots), ranks)
        self.missing = len(parameters)


class Buckets:
    """All buckets of a model, filled by hooks on its parameters, and summed by the run's reduction of gradients.

    A parameter's first gradient of a step is copied into its slot, which then becomes its `.grad`, so later
    microbatches accumulate into the slot in place. That is cheaper than adding to a zeroed buffer.

    wire  dtype in which gradients are summed
    step  number of the current step
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        comm: Comm,
        reduction: GradientReduction,
        nbytes: int,
        dtype: torch.dtype,
        wire: torch.dtype,
    ) -> None:
        self.comm, self.reduction, self.dtype, self.wire, self.step = comm, reduction, dtype, wire, 0
        shares = _iterate_shares(reversed(list(parameters.items())), nbytes // dtype.itemsize)
        self.buckets = [GradientBucket(share, comm.size, dtype) for share in shares]
        self._states = [self._make_state(bucket) for bucket in self.buckets] if comm.size > 1 else []
        self._pending: list[Pending[Tensor]] = []
        self._last = False
        for bucket in self.buckets:
            for parameter, slot in zip(bucket.parameters, bucket.slots, strict=True):
                parameter.register_post_accumulate_grad_hook(self._make_hook(bucket, slot))

    def _make_state(self, bucket: GradientBucket) -> ReductionState:
        like = torch.empty(0, dtype=self.wire, device=bucket.flat.device)
        return ReductionState(self.reduction, [bucket.layout], bucket.layout, like)

    def _make_hook(self, bucket: GradientBucket, slot: Tensor):
        def take(parameter: Tensor) -> None:
            if parameter.grad is not slot:
                assert parameter.grad is not None
                slot.copy_(parameter.grad)
                parameter.grad = slot
            if self._last:
                bucket.missing -= 1
                self._send_ready()

        return take

    def begin_last(self) -> None:
        """Announce the last backward pass of a step: from now on, completed buckets are sent."""
        self._last = True
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def _send_ready(self) -> None:
        while len(self._pending) < len(self.buckets) and not self.buckets[len(self._pending)].missing:
            self._pending.append(self._start(len(self._pending)))

    @mark_traffic("gradients")
    def _start(self, index: int) -> Pending[Tensor]:
        flat = self.buckets[index].flat.to(self.wire)
        if self.comm.size == 1:
            return self.comm.start_all_reduce(flat)
        bucket = Bucket(self.buckets[index].layout, flat, self._states[index].views, self.step)
        return self.reduction.reduce(bucket, self.comm)

    @mark_traffic("gradients")
    @torch.no_grad()
    def finish(self) -> None:
        """Send the remaining buckets, with zeros for parameters without a gradient, and wait for all buckets."""
        for bucket in self.buckets:
            for parameter, slot in zip(bucket.parameters, bucket.slots, strict=True):
                if parameter.grad is None:
                    parameter.grad = slot.zero_()
            bucket.missing = 0
        self._send_ready()
        for bucket, pending in zip(self.buckets, self._pending, strict=True):
            total = pending.wait()
            if total is not bucket.flat:
                bucket.flat.copy_(total)
        self._pending, self._last = [], False

    def local(self, mesh: Mesh, rank: int) -> tuple[Registry, list[Shard]]:
        """Return the registry of the arrays that the reduction stores for all buckets, and this rank's shards."""
        layouts = [(str(index), bucket.layout) for index, bucket in enumerate(self.buckets) if self._states]
        dtype = name_dtype(self.wire)
        pairs = (pair for name, own in layouts for pair in iterate_layouts(self.reduction, mesh, name, [own], dtype))
        registry = Registry.of(mesh, dict(pairs))
        arrays = zip(layouts, self._states, strict=True)
        return registry, [
            s for (name, _), own in arrays for s in iterate_shards(self.reduction, registry, rank, name, own)
        ]


def _iterate_shares(parameters: Iterable[tuple[str, nn.Parameter]], numel: int) -> Iterator[dict[str, nn.Parameter]]:
    """Yield groups of consecutive parameters, of at most `numel` elements each; a larger parameter is its own group."""
    share: dict[str, nn.Parameter] = {}
    size = 0
    for name, parameter in parameters:
        if share and size + parameter.numel() > numel:
            yield share
            share, size = {}, 0
        share[name] = parameter
        size += parameter.numel()
    if share:
        yield share
