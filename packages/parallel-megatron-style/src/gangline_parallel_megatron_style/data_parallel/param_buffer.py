"""One flat buffer of a parameter group on this rank: a shard of the master weights, and the full compute weights.

shard   (s,)      master weights of this rank's range, in `param_dtype` or the dtype of `ParamKind.low_bit`: the
                  optimizer updates `shard`, and a checkpoint stores it
full    (n · s,)  all ranges in the compute dtype; the model's parameters are views of `full`. Without offload and
                  resharding `shard` is a view of `full` if their dtypes are equal

Gradients are in `grad_buffer`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gangline.comm.base import Pending
from gangline.comm.purpose import mark_traffic
from gangline.runtime import ParamShard
from gangline.shard import Registry, Shard, name_model_array
from gangline_parallel_megatron_style.data_parallel.grad_buffer import GradBuffer
from gangline_parallel_megatron_style.data_parallel.grad_reducer import GradReducer
from gangline_parallel_megatron_style.data_parallel.options import BufferOptions
from gangline_parallel_megatron_style.data_parallel.views import BufferViews
from gangline_parallel_megatron_style.sharding.arrays import BufferLayout


class ParamBuffer:
    """One flat buffer of a parameter group. `shapes`: shape of each array on this rank before ZeRO shards its rows."""

    def __init__(
        self,
        layout: BufferLayout,
        shapes: Mapping[str, tuple[int, ...]],
        registry: Registry,
        rank: int,
        reducer: GradReducer,
        options: BufferOptions,
    ) -> None:
        packing, precision = layout.packing, options.precision
        self.layout, self.reducer, self.options = layout, reducer, options
        self.views = BufferViews(packing, shapes, reducer.shard.index if packing.parts > 1 else 0)
        self.reshards = options.zero == 3 and packing.parts > 1
        low_bit = layout.kind.low_bit
        shard_dtype = precision.param_dtype if low_bit is None else getattr(torch, low_bit)
        dtype = shard_dtype if layout.kind.master_dtype else precision.compute_dtype
        self.full = torch.zeros(packing.size, dtype=dtype, device=options.device)
        in_place = dtype == shard_dtype and not self.reshards and not options.offload
        self._own = self.full[self.views.own]
        self.shard = self._own if in_place else options.allocate_master_weights(packing.length, shard_dtype)
        self._in_place = in_place  # `shard` is a view of `full`
        self._unsharding: Pending[Tensor] | None = None
        self._unsharded = not self.reshards
        self.parameters = {name: self._make_parameter(name) for name in shapes}
        self.pieces = {array.name: self._make_param_shards(array.name, registry, rank) for array in packing.arrays}
        self.grads = GradBuffer(self.views, self.parameters, self.pieces, reducer, options) if self.trained else None
        if self.reshards:
            self.reshard()

    @property
    def trained(self) -> bool:
        """Return whether the parameters of this buffer have gradients."""
        return self.layout.kind.trained

    def _make_parameter(self, name: str) -> nn.Parameter:
        # `.data` has its own version counter: a refill of `full` does not invalidate tensors that autograd has saved
        parameter = nn.Parameter(self.views.view(self.full, name).data, requires_grad=self.trained)
        if self.trained and parameter.dtype != self.options.precision.grad_dtype:
            parameter.grad_dtype = self.options.precision.grad_dtype
        return parameter

    def _make_param_shards(self, name: str, registry: Registry, rank: int) -> tuple[ParamShard, ...]:
        """Return this rank's boxes of an array: leaf tensors that are views of `shard`."""
        layout, at, param_shards = registry[name_model_array(name)], self.views.locate(name), []
        for box, primary in registry.list_rank_boxes(name_model_array(name), rank):
            local = self.shard[at : at + box.size].view(box.shape)
            leaf = local.data.requires_grad_(self.trained)
            if self.trained and leaf.dtype != self.options.precision.grad_dtype:
                leaf.grad_dtype = self.options.precision.grad_dtype
            shard = Shard(name_model_array(name), layout.shape, leaf.dtype, box.offset, leaf.data, primary)
            param_shards.append(ParamShard(leaf, shard))
            at += box.size
        return tuple(param_shards)

    @torch.no_grad()
    def unshard(self) -> None:
        """Start to fill `full` from the master weights of all ranks.

        Returns at once if a fill is pending, with ZeRO stage 3 also if `full` is filled.
        """
        parts = self.layout.packing.parts
        if (parts == 1 and self._in_place) or self._unsharding is not None or (self.reshards and self._unsharded):
            return
        if self.reshards:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)
        if not self._in_place:
            self._own.copy_(self.shard, non_blocking=True)
        if parts > 1:
            with mark_traffic("weights"):
                self._unsharding = self.reducer.shard.start_all_gather(self._own, into=self.full)
        self._unsharded = True

    def wait_unshard(self) -> None:
        """Wait until `full` is filled; if `full` is freed, call `unshard` first."""
        if self.reshards and not self._unsharded:
            self.unshard()
        if self._unsharding is not None:
            self._unsharding.wait()
            self._unsharding = None

    def reshard(self) -> None:
        """Free the memory of `full` with ZeRO stage 3, unless `full` is being filled; `unshard` fills it again."""
        if self.reshards and self._unsharding is None:
            self.full.untyped_storage().resize_(0)
            self._unsharded = False

    def discard(self) -> None:
        """Free the memory of `full` with ZeRO stage 3; first wait if `full` is being filled."""
        if self._unsharding is not None:
            self.wait_unshard()
        self.reshard()
