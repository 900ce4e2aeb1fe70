"""Sequence parallelism: split and gather dim 1 (tokens), and sum over the ranks that share a sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gangline.comm.base import Comm
from gangline.model.untraced import untraced
from gangline_basics.parallel.autograd import all_gather, all_reduce
from gangline_parallel_megatron_style.tensor.rows import from_rows, to_rows
from gangline_parallel_megatron_style.tensor.setting import Setting


def cut_sequence(x: Tensor, comm: Comm) -> Tensor:
    """Return this rank's T / n consecutive tokens of (B, T, ...), a view. Raises ValueError if n does not divide T."""
    if x.shape[1] % comm.size:
        raise ValueError(f"{x.shape[1]} tokens do not divide over the {comm.size} ranks of {comm.axis}")
    size = x.shape[1] // comm.size
    return x.narrow(1, comm.index * size, size)


def gather_sequence(x: Tensor, comm: Comm) -> Tensor:
    """Gather (B, t, F) of each rank into (B, n·t, F) on all ranks; the backward sums the gradients of all ranks."""
    return from_rows(all_gather(to_rows(x, True), comm), x.shape, True)


def make_sequence_reducer(comm: Comm) -> Callable[[Tensor], Tensor]:
    """Return the function `forward_context.Frame.over_sequence`: x -> differentiable sum of x over `comm`."""
    return untraced(partial(all_reduce, comm=comm))


def make_head_gatherer(comm: Comm, sequence_parallel: bool) -> Callable[[Tensor], Tensor]:
    """Return the function `forward_context.Frame.for_all_heads`: x (B, t, F) -> (B, T, F).

    The backward of the function sums the gradients of all tp ranks.
    """
    return untraced(partial(gather_sequence, comm=comm) if sequence_parallel else partial(_Shared.apply, comm))


class _Shared(torch.autograd.Function):
    """Autograd identity for a tensor that is equal on all ranks; its backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx, comm: Comm, x: Tensor) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, ctx.comm.all_reduce(grad.contiguous())


class _Everyones(torch.autograd.Function):
    """Autograd sum over the ranks for a loss that all ranks share: the backward passes the gradient on unchanged."""

    @staticmethod
    def forward(ctx, x: Tensor, comm: Comm) -> Tensor:
        return comm.all_reduce(x.clone())

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def look_up_shard(tokens_BT: Tensor, w_VD: Tensor, *, setting: Setting) -> Tensor:
    """Look up this rank's tokens in an unsharded embedding, with sequence parallelism: (B, T) -> (B, t, D)."""
    return F.embedding(cut_sequence(tokens_BT, setting.comm) if setting.sequence_parallel else tokens_BT, w_VD)


def compute_shard_loss(
    hidden_BTD: Tensor,
    w_VD: Tensor,
    targets_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    loss: Callable[..., Tensor],
    comm: Comm,
) -> Tensor:
    """Compute `loss` of an unsharded head for this rank's tokens, and sum it over the ranks of `comm`.

    For sequence parallelism: hidden (B, t, D), w (V, D), targets and loss mask (B, T).
    """
    own = loss(hidden_BTD, w_VD, cut_sequence(targets_BT, comm), cut_sequence(loss_mask_BT, comm))
    return _Everyones.apply(own, comm)
