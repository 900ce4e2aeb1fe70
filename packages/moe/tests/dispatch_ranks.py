"""Rank functions for the tests of expert dispatch."""

from __future__ import annotations

import torch
from test_layer import layer, x_of
from torch import Tensor

from gangline.comm.base import Comm
from gangline.comm.wrap import Wrapped
from gangline.mesh import Mesh
from gangline_moe.dispatch import dispatcher
from gangline_moe.dispatch.dispatcher import TokenDispatcher
from gangline_moe.routers.base import Choice
from gangline_moe.routers.config import Sigmoid
from gangline_moe.routers.sigmoid import SigmoidRouter
from gangline_testkit import rank

# Rows begin at multiples of 64 bytes (the last bits of a matmul may depend on where its operands begin), and every
# element of an activation is computed by the vector loop (the scalar loop for what is left rounds otherwise).
WIDTH = 32


def share(module: torch.nn.Module, comm: Comm) -> None:
    """Keep this rank's experts alone."""
    module.bind(comm)
    for stack in module.experts.children():
        own = stack.weight.detach().chunk(comm.size)[comm.index].clone()
        stack.weight = torch.nn.Parameter(own)


def through(module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Output and gradients."""
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad)
    found = {name: parameter.grad for name, parameter in module.experts.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, "dlogits": module.router.logits.grad, **found}


def inputs(dtype: torch.dtype, world: int) -> tuple[Tensor, Tensor]:
    x = x_of(8, 2 * world, dtype, WIDTH)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    return x, grad


class GivenLogits(SigmoidRouter):
    """Takes its logits as given: a matmul over other rows may have other bits."""

    logits: Tensor

    def forward(self, x: Tensor) -> Choice:
        return self.choose(self.logits)


def made(dtype: torch.dtype, skew: float, x: Tensor, part: slice = slice(None)):
    """A layer for the sequences `part` of `x`. With `skew` all tokens go to the first two experts."""
    module = layer(Sigmoid(), dtype=dtype, dim=WIDTH, hidden=WIDTH)
    module.router.bias.zero_()
    module.router.bias[:2] += skew
    logits = torch.nn.functional.linear(x.flatten(0, 1), module.router.gate.weight).view(*x.shape[:2], -1)
    module.router.__class__ = GivenLogits
    module.router.logits = logits.detach()[part].flatten(0, 1).requires_grad_()
    return module


def on_ranks(dtype: torch.dtype, skew: float, ranks_per_node: int | None) -> dict[str, Tensor]:
    comm = rank.make_comms(Mesh.of({"dp_shard": rank.world}), True).get_comm("dp_shard")
    x, grad = inputs(dtype, rank.world)
    own = slice(2 * rank.index, 2 * rank.index + 2)
    module = made(dtype, skew, x, own)
    object.__setattr__(module.node, "ranks_per_node", None if ranks_per_node == -1 else ranks_per_node)
    dispatcher.FEW = 0 if ranks_per_node == -1 else 8
    share(module, comm)
    return through(module, x[own], grad[own])


def alone(dtype: torch.dtype, skew: float, world: int) -> dict[str, Tensor]:
    x, grad = inputs(dtype, world)
    return through(made(dtype, skew, x), x, grad)


class Counting(Wrapped):
    """Bytes that leave this rank, by the width of a row."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.sent: dict[int, int] = {}

    def _all_to_all(self, x, in_splits, out_splits, background):
        splits = in_splits or [len(x) // self.size] * self.size
        width = x[:1].numel() if x.dim() > 1 else 1
        rows = sum(splits) - splits[self.index]
        self.sent[width] = self.sent.get(width, 0) + rows * width * x.element_size()
        return super()._all_to_all(x, in_splits, out_splits, background)

    def _exchange(self, sends, recvs, background):
        for x, peer in sends:
            if peer != self.index:
                width = x.shape[1]
                self.sent[width] = self.sent.get(width, 0) + x.numel() * x.element_size()
        return super()._exchange(sends, recvs, background)


def bytes_sent(rows_each: int, width: int, experts: int) -> tuple[int, int, int]:
    """(of rows, of counts, the least there can be), there and back; `experts` experts, rows at random."""
    comm = Counting(rank.make_comms(Mesh.of({"dp_shard": rank.world}), False).get_comm("dp_shard"))
    generator = torch.Generator().manual_seed(rank.index)
    expert = torch.randint(0, experts, (rows_each,), generator=generator).sort().values
    counts = torch.bincount(expert, minlength=experts)
    made = TokenDispatcher(comm, torch.randn(rows_each, width), counts)
    arrived = made.dispatch()
    made.combine(arrived)
    per_rank = counts.view(comm.size, -1).sum(1)
    away_forth = int(per_rank.sum() - per_rank[comm.index])
    stay = int(per_rank[comm.index])
    away_back = len(arrived) - stay
    return comm.sent[width], comm.sent[1], (away_forth + away_back) * width * 4
