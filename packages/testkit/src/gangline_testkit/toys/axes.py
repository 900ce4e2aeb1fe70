"""Computation of `rows` along `tp`, `cp` and `pp`: shards of parameters, parts of sequences, blocks of a stage.

A minimal implementation to check that sharded modules compute the same as full modules. It stores full weights, gathers
sharded values in full and slices them, and runs one microbatch at a time through the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gangline.batch import Batch
from gangline.comm.base import Comm, Comms
from gangline.model.contracts import bind_around, bind_linear, get_seam_function
from gangline.model.linear import Embedding, Linear
from gangline.plan import Plan, matches
from gangline_basics.parallel.autograd import all_gather, all_reduce


class _Enter(torch.autograd.Function):
    """Identity before a column-parallel matmul; the backward pass sums the gradient of x over the ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.comm.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class _Leave(torch.autograd.Function):
    """Sum of partial results over the ranks after a row-parallel matmul; the backward pass is the identity."""

    @staticmethod
    def forward(ctx, x: Tensor, comm: Comm) -> Tensor:
        return comm.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class Axes:
    """Model on one rank, sharded along `tp`, `cp` and `pp`. Embedding and head are replicated along `tp`.

    used  name of a parameter -> all its names in modules

    Raises ValueError if tp does not divide a dim that the plan shards.
    """

    def __init__(self, model: nn.Module, plan: Plan, comms: Comms, used: Mapping[str, Sequence[str]]) -> None:
        self.model, self.plan, self.world = model, plan, comms.world
        self.tp, self.cp, self.pp = (comms.get_comm(axis) for axis in ("tp", "cp", "pp"))
        self.beside = comms.get_comm("cp", "pp")  # Comm of the ranks with other tokens or other blocks
        self.speaks = self.tp.index == 0  # whether this tp rank contributes to losses and metrics
        self.first = self.speaks and self.cp.index == self.pp.index == 0
        self.dims: dict[str, int] = {}  # name -> dim that tp shards
        for name, (alias, *_) in used.items():
            parameter, module = model.get_parameter(alias), model.get_submodule(alias.rpartition(".")[0])
            rule = plan.get_shard_rules(name, parameter.dim()).get("tp")
            head = self._has_seam("loss", alias) and get_seam_function(module, "loss") is not None
            if self.tp.size == 1 or rule is None or head or isinstance(module, Embedding):
                continue
            if parameter.shape[rule.dim] % (rule.granularity * self.tp.size):
                size = parameter.shape[rule.dim]
                raise ValueError(
                    f"{name}: size {size} is not divisible by tp={self.tp.size} in units of {rule.granularity}"
                )
            self.dims[name] = rule.dim

    def _has_seam(self, name: str, path: str) -> bool:
        return any(seam.name == name and matches(seam.pattern, path) for seam in self.plan.seams)

    # --- tp: shards of parameters ------------------------------------------------------------------------------------

    def take_part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's tp shard of a full array, or the full array if tp does not shard the array."""
        return whole.chunk(self.tp.size, self.dims[name])[self.tp.index] if name in self.dims else whole

    def reduce_gradient(self, name: str, gradient: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the full gradient, summed over tp, cp and pp; for replicated parameters it must be equal along tp.

        If they differ, the result is wrong without an error, and the comparison with one process fails.
        """
        whole = gradient.new_zeros(shape)
        self.take_part(name, whole).copy_(gradient)
        if self.tp.size > 1:
            self.tp.all_reduce(whole)
            if name not in self.dims and not any(matches(pattern, name) for pattern in self.plan.partial_grad):
                whole /= self.tp.size
        return self.beside.all_reduce(whole) if self.beside.size > 1 else whole

    def install(self) -> None:
        """Make the modules compute with shards. Called after `set_matmuls` and before `finish_blocks`."""
        bound: set[str] = set()
        for path, module in self.model.named_modules():
            sharded = [name for name, _ in module.named_parameters(path, recurse=False) if name in self.dims]
            if sharded and isinstance(module, Linear):
                module.matmul = partial(
                    self._multiply_column if self.dims[f"{path}.weight"] == 0 else self._multiply_row, module.matmul
                )
                bind_linear(module, path, self.tp, bound)
            elif sharded:
                bind_around(self.model, sharded[0], "tp", self.tp, bound)
            if self.cp.size > 1 and self._has_seam("attention", path) and "attention" in vars(module):
                module.attention = partial(self._attend, module.attention)

    def _multiply_column(self, matmul: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return matmul(_Enter.apply(x, self.tp), w, b)

    def _multiply_row(self, matmul: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        y = _Leave.apply(matmul(x, w, None), self.tp)
        return y if b is None else y + b

    # --- cp: a part of the tokens ------------------------------------------------------------------------------------

    def split_tokens(self, batch: Batch) -> Batch:
        """Return a batch with this rank's part of each sequence. Raises ValueError if cp does not divide the length."""
        if batch.shape[1] % self.cp.size:
            raise ValueError(f"the sequence length {batch.shape[1]} is not divisible by cp={self.cp.size}")
        values = {item.name: getattr(batch, item.name) for item in fields(batch)}
        matrices = {name: x for name, x in values.items() if isinstance(x, Tensor) and x.dim() == 2}
        own: dict[str, Any] = {name: self._take_part(x) for name, x in matrices.items()}
        return replace(batch, **own, rows=(batch, self._take_part)) if self.cp.size > 1 else batch

    def _take_part(self, x_BT: Tensor) -> Tensor:
        return x_BT.chunk(self.cp.size, 1)[self.cp.index]

    def reduce_over_sequence(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.cp)

    def _attend(
        self,
        own: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        document: Tensor | None,
        position: Tensor,
        *more,
    ) -> Tensor:
        """Return this rank's part of the attention over all tokens. own: attention function of the module."""
        q, k, v = (self._gather(x, 2) for x in (q, k, v))
        document = None if document is None else self._gather(document, 1)
        out = own(q, k, v, document, self._gather(position, 1), *more)
        return out.chunk(self.cp.size, 2)[self.cp.index]

    def _gather(self, x: Tensor, dim: int) -> Tensor:
        return all_gather(x.movedim(dim, 0), self.cp).movedim(0, dim)

    # --- pp: a part of the blocks ------------------------------------------------------------------------------------

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return the loss of this rank's tokens on the last stage, else 0, and store the outputs for `backward`."""
        last, hidden = self.pp.size - 1, None
        for stage in range(self.pp.size):
            if stage == self.pp.index:
                self._in = hidden
                self._out = self._run_blocks(batch, hidden)
            if stage < last:
                hidden = self._send_stage(self._out if stage == self.pp.index else None)
                hidden.requires_grad_(torch.is_grad_enabled())
        return self._out if self.pp.index == last else torch.zeros((), dtype=torch.float64)

    def backward(self, coefficient: float) -> None:
        """Run the backward pass of the last `compute_loss`, with the loss times `coefficient`."""
        gradient = None
        for stage in reversed(range(self.pp.size)):
            if stage == self.pp.index:
                start = torch.full_like(self._out, coefficient) if gradient is None else gradient
                if self._out.requires_grad:  # False if the first stage is not trained
                    torch.autograd.backward(self._out, start)
            if stage > 0:
                gradient = self._send_stage(self._in.grad if stage == self.pp.index else None)  # type: ignore[attr-defined]

    def _run_blocks(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        if hidden is None:
            hidden = self.model.get_submodule(self.plan.embed)(batch)
        blocks = list(self.model.get_submodule(self.plan.blocks).children())
        first, stop = (len(blocks) * (self.pp.index + more) // self.pp.size for more in (0, 1))
        for block in blocks[first:stop]:
            hidden = block(hidden, batch)
        last = self.pp.index == self.pp.size - 1
        return self.model.get_submodule(self.plan.head)(hidden, batch) if last else hidden

    def _send_stage(self, x: Tensor | None) -> Tensor:
        """Send the output (3 dims) of one stage to all stages, by a sum with zeros, and return it as a leaf tensor."""
        sizes = torch.tensor((0, 0, 0) if x is None else x.shape)
        self.pp.all_reduce(sizes)
        dtype = next(self.model.parameters()).dtype
        x = torch.zeros(sizes.tolist(), dtype=dtype) if x is None else x.detach().to(dtype).contiguous().clone()
        return self.pp.all_reduce(x)
