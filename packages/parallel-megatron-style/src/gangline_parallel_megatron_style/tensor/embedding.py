"""The vocabulary cut over tp (arXiv 1909.08053, section 3): each rank looks up the tokens whose rows it holds.

forward    h = all-reduce(E_i[token] where the token is here, else 0), or reduce-scatter along the sequence
backward   dh as it comes, or gathered; each row of E_i adds up the gradients of its tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.model.weight_grads import accumulate_grad, defer
from gangline_parallel_megatron_style.tensor.rows import from_rows
from gangline_parallel_megatron_style.tensor.setting import Setting, make_anchor


@dataclass(frozen=True)
class Lookup:
    """The rows from `first` on are here, as many as the weight has, perhaps none."""

    setting: Setting
    first: int

    def __call__(self, tokens_BT: Tensor, w_VD: Tensor) -> Tensor:
        """tokens (B, T) -> their rows (B, t, D); t = T / n under sequence parallelism, else T."""
        tokens_first = self.setting.sequence_parallel
        tokens_N = (tokens_BT.t() if tokens_first else tokens_BT).reshape(-1)
        h_ND = _Lookup.apply(tokens_N - self.first, make_anchor(w_VD), (w_VD,), self.setting)
        return from_rows(h_ND, (*tokens_BT.shape, 0), tokens_first)


class _Lookup(torch.autograd.Function):
    """Numbers of rows (N,), of which those outside of 0 to V are elsewhere, -> (N, D) or this rank's part of them."""

    @staticmethod
    def forward(ctx, rows_N: Tensor, anchor: Tensor | None, hidden: tuple[Tensor], setting: Setting) -> Tensor:
        (w,) = ctx.hidden = hidden
        size = w.shape[0]
        rows_N = rows_N.masked_fill((rows_N < 0) | (rows_N >= size), size)  # one past the last: no row of this rank
        ctx.setting = setting
        ctx.save_for_backward(rows_N)
        if size:
            h_ND = w[rows_N.clamp(max=size - 1)].masked_fill_((rows_N == size)[:, None], 0)
        else:
            h_ND = w.new_zeros(*rows_N.shape, w.shape[1])
        return setting.comm.reduce_scatter(h_ND) if setting.sequence_parallel else setting.comm.all_reduce(h_ND)

    @staticmethod
    def backward(ctx, dh_ND: Tensor):
        (rows_N,), (w,), setting = ctx.saved_tensors, ctx.hidden, ctx.setting
        if setting.sequence_parallel:
            dh_ND = setting.comm.all_gather(dh_ND.contiguous())

        def accumulate_weight_grads() -> None:
            size = w.shape[0]  # a token that is elsewhere counts as padding, which is skipped
            accumulate_grad(w, torch.ops.aten.embedding_dense_backward(dh_ND, rows_N, size + 1, size, False)[:size])

        defer(accumulate_weight_grads)
        return None, None, None, None
