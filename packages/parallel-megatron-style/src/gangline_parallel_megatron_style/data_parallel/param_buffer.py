"""One flat buffer of a group on this rank: its range of the masters, the whole for compute, and the gradients.

shard   (s,)      masters of this rank's range, in `param_dtype`: what the optimizer steps and a checkpoint keeps
full    (n · s,)  all ranges in the compute dtype; parameters are views of it. Where one rank has it all and the
                  dtypes agree it is `shard` itself
grad    (n · s,)  gradients; each parameter's `.grad` is a view of it
total   (s,)      their sum over the ranks: in its range of `grad`, or, where that is given back after each
                  microbatch, in memory of its own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from gangline.comm import Pending
from gangline.precision import Precision
from gangline.runtime import ParamShard
from gangline.shard import Registry, Shard
from gangline_parallel_megatron_style.data_parallel.codec import GradCodec
from gangline_parallel_megatron_style.data_parallel.grad_reducer import GradReducer
from gangline_parallel_megatron_style.sharding.arrays import BufferLayout


@dataclass(frozen=True)
class BufferOptions:
    """How all buffers of a rank are kept.

    zero   what is cut: 1 the optimizer state, 2 gradients too, 3 weights too (0: nothing)
    each   gradients that are cut are added over the ranks that cut them after each microbatch, so that no rank keeps
           all of them
    wire   dtype of gradients as they are added over the ranks
    codec  what they travel as, None: as they are
    offload  masters, and so the optimizer and its state, lie in host memory
    """

    precision: Precision
    device: torch.device
    zero: int
    each: bool
    wire: torch.dtype
    codec: GradCodec | None = None
    offload: bool = False

    def masters(self, size: int) -> Tensor:
        """Memory for so many numbers that the optimizer steps; pinned where they are copied to a GPU."""
        if not self.offload:
            return torch.zeros(size, dtype=self.precision.param_dtype, device=self.device)
        return torch.zeros(size, dtype=self.precision.param_dtype, pin_memory=self.device.type == "cuda")


class ParamBuffer:
    """See the module. `shapes`: the shape of each array on this rank."""

    def __init__(
        self,
        buffer: BufferLayout,
        shapes: Mapping[str, tuple[int, ...]],
        registry: Registry,
        rank: int,
        sums: GradReducer,
        choices: BufferOptions,
    ) -> None:
        self.buffer, self.shapes, self.sums, self.choices = buffer, shapes, sums, choices
        packing, dtypes = buffer.packing, choices.precision
        self.length, self.index = packing.length, sums.shard.index if packing.parts > 1 else 0
        self._starts = {array.name: start for array, start in zip(packing.arrays, packing.starts, strict=True)}
        self.dtype = dtypes.param_dtype if buffer.kind.full else dtypes.compute_dtype
        self.trained = buffer.kind.trained
        self.each = choices.each and packing.parts > 1
        whole = packing.parts == 1 and self.dtype == dtypes.param_dtype and not choices.offload
        self.releases = choices.zero == 3 and packing.parts > 1
        self._own = own = slice(self.index * self.length, (self.index + 1) * self.length)
        self.full = torch.zeros(packing.size, dtype=self.dtype, device=choices.device)
        in_place = self.dtype == dtypes.param_dtype and not self.releases and not choices.offload
        self.shard = self.full[own] if in_place else choices.masters(self.length)
        self.own = self.full[own]
        self._copies = not in_place  # the compute dtype differs, the whole comes and goes, or lies elsewhere
        self._whole = whole
        self._gathering: Pending[Tensor] | None = None
        self.ready = not self.releases
        self.parameters = {name: self._parameter(name) for name in shapes}
        self._slots: dict[str, Tensor] = {}
        self._gaps = gaps([(self._starts[name], prod(shape)) for name, shape in shapes.items()], packing.size)
        self._grad: Tensor | None = None
        self._pending: Pending[Tensor] | None = None
        self._crossing: Pending[Tensor] | None = None
        self.total: Tensor | None = None
        self.pieces = self._cut(registry, rank)
        if self.releases:
            self.release()

    # --- where things lie -------------------------------------------------------------------------------------------

    def _start(self, name: str) -> int:
        return self._starts[name]

    def _view(self, flat: Tensor, name: str) -> Tensor:
        start, shape = self._start(name), self.shapes[name]
        size = torch.Size(shape).numel()
        return flat[start : start + size].view(shape)

    def _parameter(self, name: str) -> nn.Parameter:
        # .data has a version counter of its own: filling `full` again is no change of what autograd has saved
        parameter = nn.Parameter(self._view(self.full, name).data, requires_grad=self.trained)
        if self.trained:
            if parameter.dtype != self.choices.precision.grad_dtype:
                parameter.grad_dtype = self.choices.precision.grad_dtype
            take = self._take(name)
            parameter.register_post_accumulate_grad_hook(take)
            parameter.deposited = lambda: take(parameter)  # type: ignore[attr-defined]
        return parameter

    def _cut(self, registry: Registry, rank: int) -> dict[str, tuple[ParamShard, ...]]:
        """The boxes of each array that this rank has, as leaves that are views of `shard`."""
        pieces = {}
        for array in self.buffer.packing.arrays:
            name, layout = array.name, registry[f"model/{array.name}"]
            at = max(self._start(name) - self.index * self.length, 0)
            cut = []
            for box, primary in registry.of_rank(f"model/{name}", rank):
                local = self.shard[at : at + box.size].view(box.shape)
                leaf = local.data.requires_grad_(self.trained)
                if self.trained and leaf.dtype != self.choices.precision.grad_dtype:
                    leaf.grad_dtype = self.choices.precision.grad_dtype
                shard = Shard(f"model/{name}", layout.shape, leaf.dtype, box.offset, leaf.data, primary)
                cut.append(ParamShard(leaf, shard))
                at += box.size
            pieces[name] = tuple(cut)
        return pieces

    # --- weights ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self) -> None:
        """Start to fill `full` from the masters of all ranks."""
        if self._whole or self._gathering is not None or (self.releases and self.ready):
            return
        if self.releases:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)
        if self._copies:
            self.own.copy_(self.shard, non_blocking=True)
        if self.buffer.packing.parts > 1:
            self._gathering = self.sums.shard.start_all_gather(self.own, into=self.full)
        self.ready = True

    def wait(self) -> None:
        """Until `full` is filled."""
        if self.releases and not self.ready:
            self.gather()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def wait_and_release(self) -> None:
        """Forget what was gathered, also what is still on its way."""
        if self._gathering is not None:
            self.wait()
        self.release()

    def release(self) -> None:
        """Give the memory of the whole back; it is gathered again when it is needed."""
        if self.releases and self._gathering is None:
            self.full.untyped_storage().resize_(0)
            self.ready = False

    # --- gradients --------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget the gradients of the last step."""
        self.total = self._pending = self._crossing = None
        for parameter in self.parameters.values():
            parameter.grad = None
        for pieces in self.pieces.values():
            for piece in pieces:
                piece.tensor.grad = None

    def _slot(self, name: str) -> Tensor:
        if self._grad is None:
            size, dtype = self.full.numel(), self.choices.precision.grad_dtype
            self._grad = torch.empty(size, dtype=dtype, device=self.choices.device)
            self._zero_gaps()
            self._slots = {name: self._view(self._grad, name) for name in self.parameters}
        return self._slots[name]

    def _zero_gaps(self) -> None:
        """What is no parameter's travels, too."""
        assert self._grad is not None
        for gap in self._gaps:
            self._grad[gap].zero_()

    def _take(self, name: str):
        """The first gradient of a step is copied to its place, and later ones are added there."""

        def take(parameter: Tensor) -> None:
            if parameter.grad is None:
                return  # autograd came by without a gradient: it is deposited later
            slot = self._slot(name)
            if parameter.grad is not slot:
                slot.copy_(parameter.grad)
                parameter.grad = slot

        return take

    @torch.no_grad()
    def reduce(self) -> None:
        """The backward pass of a microbatch is through with this group: begin to add its gradients over the ranks."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                self._slot(name).zero_()
        self.collect()
        assert self._grad is not None
        if self.choices.codec is not None:  # signs of nothing have come back and lie there
            self._zero_gaps()
        grad = self._grad
        wire = grad.to(self.choices.wire)
        self._pending = self.sums.reduce(wire)
        if self.each:  # the next microbatch begins anew, in other memory, and this one is free when it has arrived
            self._grad, self._slots = None, {}
            for parameter in self.parameters.values():
                parameter.grad = None

    @torch.no_grad()
    def collect(self) -> None:
        """Wait for the sum under way, and add it to `total`."""
        if self._pending is None:
            return
        part = self._pending.wait()
        self._pending = None
        if not self.each:
            assert self._grad is not None
            self.total = self._grad[self._own]  # this rank's own gradients have been sent, so the sum takes their place
            if part.data_ptr() != self.total.data_ptr():
                self.total.copy_(part)
        elif self.total is None:
            self.total = part.to(self.choices.precision.grad_dtype)
        else:
            self.total.add_(part)

    @torch.no_grad()
    def cross(self) -> None:
        """`total` has all microbatches: begin to add it over the replicas, where that is left."""
        assert self.total is not None
        if self.sums.later:
            self._crossing = self.sums.across(self.total.to(self.choices.wire))

    @torch.no_grad()
    def arrive(self) -> None:
        """Wait until `total` is the sum over all ranks."""
        if self._crossing is not None:
            whole = self._crossing.wait()
            self._crossing = None
            assert self.total is not None
            if whole.data_ptr() != self.total.data_ptr():
                self.total.copy_(whole)

    def hand_over(self) -> None:
        """Give every piece its gradient: a view of `total`, brought to where the piece lies."""
        assert self.total is not None
        total = self.total.to(self.shard.device)
        at_range = self.index * self.length
        for name, pieces in self.pieces.items():
            at = max(self._start(name) - at_range, 0)
            for piece in pieces:
                size = piece.tensor.numel()
                piece.tensor.grad = total[at : at + size].view(piece.tensor.shape)
                at += size


def gaps(taken: Sequence[tuple[int, int]], size: int) -> list[slice]:
    """What of a buffer of `size` lies between runs (start, length), before and behind them."""
    found, free = [], 0
    for start, length in [*sorted(taken), (size, 0)]:
        if start > free:
            found.append(slice(free, start))
        free = start + length
    return found
