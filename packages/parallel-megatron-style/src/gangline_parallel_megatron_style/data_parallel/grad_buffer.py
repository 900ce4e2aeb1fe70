"""Gradients of one flat buffer: accumulated over microbatches, reduced over ranks, assigned to the optimizer's leaves.

grad    (n · s,)  gradients of this rank; each parameter's `.grad` is a view of `grad`
total   (s,)      gradients of this rank's range, summed over all ranks: a view of `grad`, or separate memory if `grad`
                  is freed after each microbatch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from gangline.comm.base import Pending
from gangline.comm.purpose import mark_traffic
from gangline.model.weight_grads import call_when_accumulated
from gangline.runtime import ParamShard
from gangline_parallel_megatron_style.data_parallel.grad_reducer import GradReducer
from gangline_parallel_megatron_style.data_parallel.options import BufferOptions
from gangline_parallel_megatron_style.data_parallel.views import BufferViews


class GradBuffer:
    """Gradients of one flat buffer on this rank.

    Order of calls in a step: `reduce_scatter` and `wait_reduce_scatter` after microbatches, at the end
    `all_reduce_replicas`, `wait_all_reduce` and `assign`.
    """

    def __init__(
        self,
        views: BufferViews,
        parameters: Mapping[str, nn.Parameter],
        pieces: Mapping[str, tuple[ParamShard, ...]],
        reducer: GradReducer,
        options: BufferOptions,
    ) -> None:
        self.views, self.reducer, self.options = views, reducer, options
        self._parameters, self._pieces = parameters, pieces
        self.each_microbatch = options.each_microbatch and views.packing.parts > 1
        self.grad: Tensor | None = None
        self.total: Tensor | None = None
        self._slots: dict[str, Tensor] = {}
        self._reducing: Pending[Tensor] | None = None
        self._crossing: Pending[Tensor] | None = None
        length, dtype = views.packing.length, options.precision.grad_dtype
        # copy of `total` in host memory, where the optimizer steps with offload
        self._in_host = options.allocate_host_memory(length, dtype) if options.offload else None
        for name, parameter in parameters.items():
            call_when_accumulated(parameter, self._take(name))

    def clear(self) -> None:
        """Drop the gradients of the previous step."""
        self.total = self._reducing = self._crossing = None
        for parameter in self._parameters.values():
            parameter.grad = None
        for pieces in self._pieces.values():
            for piece in pieces:
                piece.tensor.grad = None

    def _allocate(self) -> Tensor:
        if self.grad is None:
            dtype, device = self.options.precision.grad_dtype, self.options.device
            self.grad = torch.empty(self.views.packing.size, dtype=dtype, device=device)
            self._slots = {name: self.views.view(self.grad, name) for name in self._parameters}
            self._clear_gaps(self.grad)
        return self.grad

    def _clear_gaps(self, grad: Tensor) -> None:
        """Set the gaps between arrays to 0, because the reduction over ranks includes them."""
        for gap in self.views.gaps:
            grad[gap].zero_()

    def _take(self, name: str) -> Callable[[Tensor], None]:
        """Return a hook that copies a parameter's first gradient of a step into `grad`; autograd adds later ones."""

        def take(parameter: Tensor) -> None:
            self._allocate()
            slot = self._slots[name]
            if parameter.grad is not None and parameter.grad is not slot:
                slot.copy_(parameter.grad)
                parameter.grad = slot

        return take

    @torch.no_grad()
    def reduce_scatter(self) -> None:
        """Start to reduce this buffer's gradients over the ranks. Call after the backward pass of a microbatch."""
        grad = self._allocate()
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                self._slots[name].zero_()
        self.wait_reduce_scatter()
        if self.options.reduction is not None:  # the previous reduction may have written into the gaps
            self._clear_gaps(grad)
        self._reducing = self.reducer.reduce(grad.to(self.options.reduce_dtype))
        if self.each_microbatch:  # the next microbatch allocates new memory; this memory is freed after the reduction
            self.grad, self._slots = None, {}
            for parameter in self._parameters.values():
                parameter.grad = None

    @mark_traffic("gradients")
    @torch.no_grad()
    def wait_reduce_scatter(self) -> None:
        """Wait for the pending reduction, if any; store its result in `total`, or add it to `total`."""
        if self._reducing is None:
            return
        part = self._reducing.wait()
        self._reducing = None
        if not self.each_microbatch:
            # overwrites this rank's own gradients, which the reduction has already read
            self.total = self._allocate()[self.views.own]
            if part.data_ptr() != self.total.data_ptr():
                self.total.copy_(part)
        elif self.total is None:
            self.total = part.to(self.options.precision.grad_dtype)
        else:
            self.total.add_(part)

    @torch.no_grad()
    def all_reduce_replicas(self) -> None:
        """Start to sum `total` over the replicas, unless `GradReducer.reduce` did. Call after the last microbatch."""
        assert self.total is not None
        if self.reducer.leaves_replicas:
            self._crossing = self.reducer.all_reduce_replicas(self.total.to(self.options.reduce_dtype))

    @mark_traffic("gradients")
    @torch.no_grad()
    def wait_all_reduce(self) -> None:
        """Wait until `total` is summed over all ranks."""
        if self._crossing is None:
            return
        whole = self._crossing.wait()
        self._crossing = None
        assert self.total is not None
        if whole.data_ptr() != self.total.data_ptr():
            self.total.copy_(whole)

    def assign(self) -> None:
        """Set the `.grad` of each leaf of the optimizer to a view of `total`.

        With offload the view is of a copy in host memory, which is valid after the device is synchronized.
        """
        assert self.total is not None
        total = self.total if self._in_host is None else self._in_host.copy_(self.total, non_blocking=True)
        for name, pieces in self._pieces.items():
            at = self.views.locate(name)
            for piece in pieces:
                size = piece.tensor.numel()
                piece.tensor.grad = total[at : at + size].view(piece.tensor.shape)
                at += size
