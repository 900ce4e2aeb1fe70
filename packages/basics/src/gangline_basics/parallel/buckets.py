"""Adding gradients over ranks in buckets, each under way as soon as its last gradient is there.

As in PyTorch DDP (Li et al., VLDB 2020, section 3.2.3): parameters fill buckets in reverse order, which is about the
order of the backward pass, and buckets leave in order, so all ranks make the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gangline.comm.base import Comm, Pending


class GradientBucket:
    """One flat buffer, and the gradients that are views of it."""

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
        parts = self.flat.split(sizes)
        self.slots = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        self.missing = len(parameters)


class Buckets:
    """All buckets of a model, filled by hooks on its parameters.

    A parameter's first gradient of a step is copied into its slot, which is its `.grad` from then on, so later
    microbatches add to it in place. That is cheaper than to add to a zeroed buffer.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], comm: Comm, nbytes: int, dtype: torch.dtype, wire: torch.dtype
    ) -> None:
        self.comm, self.dtype, self.wire = comm, dtype, wire
        self.buckets = [
            GradientBucket(share, dtype) for share in _shares(list(reversed(parameters)), nbytes // dtype.itemsize)
        ]
        self._pending: list[Pending[Tensor]] = []
        self._last = False
        for bucket in self.buckets:
            for parameter, slot in zip(bucket.parameters, bucket.slots, strict=True):
                parameter.register_post_accumulate_grad_hook(self._hook(bucket, slot))

    def _hook(self, bucket: GradientBucket, slot: Tensor):
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
        """The last backward pass of a step is about to run: what it completes may leave."""
        self._last = True
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def _send_ready(self) -> None:
        while len(self._pending) < len(self.buckets) and not self.buckets[len(self._pending)].missing:
            bucket = self.buckets[len(self._pending)]
            self._pending.append(self.comm.start_all_reduce(bucket.flat.to(self.wire)))

    def finish(self) -> None:
        """Send what is left, zeros for parameters without a gradient, and wait for all of it."""
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


def _shares(parameters: list[nn.Parameter], numel: int) -> list[list[nn.Parameter]]:
    """Runs of parameters of about `numel` elements each; a larger parameter has a bucket to itself."""
    shares: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        if not shares or filled + parameter.numel() > numel:
            shares.append([])
            filled = 0
        shares[-1].append(parameter)
        filled += parameter.numel()
    return shares
