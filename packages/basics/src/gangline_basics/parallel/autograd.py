"""Differentiable collectives. The loss is the sum over all ranks, so the backward pass of a collective is its adjoint.

forward          backward
all_reduce       all_reduce
all_gather       reduce_scatter
reduce_scatter   all_gather
all_to_all       all_to_all, splits swapped
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gangline.comm.base import Comm


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return comm.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.comm.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return comm.all_gather(x.contiguous())

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.comm.reduce_scatter(grad.contiguous()), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return comm.reduce_scatter(x.contiguous())

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.comm.all_gather(grad.contiguous()), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, comm: Comm, in_splits, out_splits) -> Tensor:
        ctx.comm, ctx.in_splits, ctx.out_splits = comm, in_splits, out_splits
        return comm.all_to_all(x.contiguous(), in_splits, out_splits)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.comm.all_to_all(grad.contiguous(), ctx.out_splits, ctx.in_splits), None, None, None


def all_reduce(x: Tensor, comm: Comm) -> Tensor:
    """Sum `x` over the ranks of `comm`, and return the sum on every rank; `x` is not modified."""
    return x if comm.size == 1 else _AllReduce.apply(x, comm)


def all_gather(x: Tensor, comm: Comm) -> Tensor:
    """Gather the tensors (s, ...) of n ranks to (n·s, ...) on every rank."""
    return x if comm.size == 1 else _AllGather.apply(x, comm)


def reduce_scatter(x: Tensor, comm: Comm) -> Tensor:
    """Sum the tensors (n·s, ...) of n ranks, and return this rank's shard (s, ...) of the sum."""
    return x if comm.size == 1 else _ReduceScatter.apply(x, comm)


def all_to_all(
    x: Tensor, comm: Comm, in_splits: Sequence[int] | None = None, out_splits: Sequence[int] | None = None
) -> Tensor:
    """Exchange rows of dim 0 with each peer; see `Comm.all_to_all`."""
    return x if comm.size == 1 else _AllToAll.apply(x, comm, in_splits, out_splits)
