"""What a rank of `rows` computes with along `tp`, `cp` and `pp`: its part of what is cut, its tokens, its blocks.

No weight is stored in parts, what is cut away is gathered whole and sliced, and one microbatch at a time passes the
stages: so much, and no more, as it takes to see that a module computes the same where it is cut.
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
    """x -> x, in front of a product that is cut along its outputs: each rank has a part of x's gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.comm.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class _Leave(torch.autograd.Function):
    """Partial sums -> their sum, behind a product that is cut along its inputs."""

    @staticmethod
    def forward(ctx, x: Tensor, comm: Comm) -> Tensor:
        return comm.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class Axes:
    """The model on one rank. Embedding and head stay whole along `tp`, as a plan allows.

    used  name of a parameter -> all names that modules have it under

    Raises ValueError where tp does not divide what it cuts.
    """

    def __init__(self, model: nn.Module, plan: Plan, comms: Comms, used: Mapping[str, Sequence[str]]) -> None:
        self.model, self.plan, self.world = model, plan, comms.world
        self.tp, self.cp, self.pp = (comms.get_comm(axis) for axis in ("tp", "cp", "pp"))
        self.beside = comms.get_comm("cp", "pp")  # ranks that have other tokens, or other blocks
        self.speaks = self.tp.index == 0  # else another rank says what this one would
        self.first = self.speaks and self.cp.index == self.pp.index == 0
        self.dims: dict[str, int] = {}  # name -> the dim that tp cuts
        for name, (alias, *_) in used.items():
            parameter, module = model.get_parameter(alias), model.get_submodule(alias.rpartition(".")[0])
            cut = plan.get_cuts(name, parameter.dim()).get("tp")
            head = self._has_seam("loss", alias) and get_seam_function(module, "loss") is not None
            if self.tp.size == 1 or cut is None or head or isinstance(module, Embedding):
                continue
            if parameter.shape[cut.dim] % (cut.unit * self.tp.size):
                size = parameter.shape[cut.dim]
                raise ValueError(f"{name}: {size} in units of {cut.unit} do not divide by tp={self.tp.size}")
            self.dims[name] = cut.dim

    def _has_seam(self, name: str, path: str) -> bool:
        return any(seam.name == name and matches(seam.pattern, path) for seam in self.plan.seams)

    # --- tp: a part of what is cut -----------------------------------------------------------------------------------

    def take_part(self, name: str, whole: Tensor) -> Tensor:
        """What this rank computes with."""
        return whole.chunk(self.tp.size, self.dims[name])[self.tp.index] if name in self.dims else whole

    def reduce_gradient(self, name: str, gradient: Tensor, shape: Sequence[int]) -> Tensor:
        """The gradient of the whole, added over the ranks beside this one; of what is whole along tp all have the same.

        Raises no error where they have not: it is then wrong, and a comparison finds it.
        """
        whole = gradient.new_zeros(shape)
        self.take_part(name, whole).copy_(gradient)
        if self.tp.size > 1:
            self.tp.all_reduce(whole)
            if name not in self.dims and not any(matches(pattern, name) for pattern in self.plan.partial_grad):
                whole /= self.tp.size
        return self.beside.all_reduce(whole) if self.beside.size > 1 else whole

    def install(self) -> None:
        """Let the modules compute with parts; their products are set already, blocks not yet finished."""
        bound: set[str] = set()
        for path, module in self.model.named_modules():
            cut = [name for name, _ in module.named_parameters(path, recurse=False) if name in self.dims]
            if cut and isinstance(module, Linear):
                module.product = partial(
                    self._multiply_column if self.dims[f"{path}.weight"] == 0 else self._multiply_row, module.product
                )
                bind_linear(module, path, self.tp, bound)
            elif cut:
                bind_around(self.model, cut[0], "tp", self.tp, bound)
            if self.cp.size > 1 and self._has_seam("attention", path) and "attention" in vars(module):
                module.attention = partial(self._attend, module.attention)

    def _multiply_column(self, product: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return product(_Enter.apply(x, self.tp), w, b)

    def _multiply_row(self, product: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        y = _Leave.apply(product(x, w, None), self.tp)
        return y if b is None else y + b

    # --- cp: a part of the tokens ------------------------------------------------------------------------------------

    def split_tokens(self, batch: Batch) -> Batch:
        """This rank's part of each sequence. Raises ValueError where cp does not divide them."""
        if batch.shape[1] % self.cp.size:
            raise ValueError(f"sequences of {batch.shape[1]} tokens do not divide by cp={self.cp.size}")
        values = {item.name: getattr(batch, item.name) for item in fields(batch)}
        cut = {name: x for name, x in values.items() if isinstance(x, Tensor) and x.dim() == 2}
        own: dict[str, Any] = {name: self._take_part(x) for name, x in cut.items()}
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
        """Of all tokens, by whatever function the module has there; this rank's part of it."""
        q, k, v = (self._gather(x, 2) for x in (q, k, v))
        document = None if document is None else self._gather(document, 1)
        out = own(q, k, v, document, self._gather(position, 1), *more)
        return out.chunk(self.cp.size, 2)[self.cp.index]

    def _gather(self, x: Tensor, dim: int) -> Tensor:
        return all_gather(x.movedim(dim, 0), self.cp).movedim(0, dim)

    # --- pp: a part of the blocks ------------------------------------------------------------------------------------

    def compute_loss(self, batch: Batch) -> Tensor:
        """The loss of this rank's tokens where its blocks are the last; 0 elsewhere. `backward` goes on from here."""
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
        """Of the loss before, times `coefficient`."""
        gradient = None
        for stage in reversed(range(self.pp.size)):
            if stage == self.pp.index:
                start = torch.full_like(self._out, coefficient) if gradient is None else gradient
                if self._out.requires_grad:  # of a first stage that is not trained nothing does
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
        """What one stage gives, of three dims, on all stages: a leaf. The others add zeros."""
        sizes = torch.tensor((0, 0, 0) if x is None else x.shape)
        self.pp.all_reduce(sizes)
        dtype = next(self.model.parameters()).dtype
        x = torch.zeros(sizes.tolist(), dtype=dtype) if x is None else x.detach().to(dtype).contiguous().clone()
        return self.pp.all_reduce(x)
