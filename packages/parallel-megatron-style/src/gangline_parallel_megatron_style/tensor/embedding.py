"""Embedding sharded over tp by vocabulary (arXiv 1909.08053, section 3): each rank looks up the tokens of its rows.

forward    h = all-reduce(E_i[token] if this rank has the token's row, else 0); with sequence parallelism reduce-scatter
backward   dh unchanged; with sequence parallelism all-gathered. Each row of E_i sums the gradients of its tokens
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
    """Lookup in a vocabulary shard. `first`: first vocabulary row of the shard's weight, which may have no rows."""

    setting: Setting
    first: int

    def __call__(self, tokens_BT: Tensor, w_VD: Tensor) -> Tensor:
        """Return the embeddings (B, t, D) of tokens (B, T); t = T / n ranks with sequence parallelism, else T."""
        tokens_first = self.setting.sequence_parallel
        tokens_N = (tokens_BT.t() if tokens_first else tokens_BT).reshape(-1)
        h_ND = _Lookup.apply(tokens_N - self.first, make_anchor(w_VD), (w_VD,), self.setting)
        return from_rows(h_ND, (*tokens_BT.shape, 0), tokens_first)


class _Lookup(torch.autograd.Function):
    """Autograd function: rows (N,) -> embeddings (N, D), or this rank's tokens of them with sequence parallelism.

    rows: row indices relative to this rank's first row; rows of other ranks are outside of 0 to V - 1
    """

    @staticmethod
    def forward(ctx, rows_N: Tensor, anchor: Tensor | None, hidden: tuple[Tensor], setting: Setting) -> Tensor:
        (w,) = ctx.hidden = hidden
        size = w.shape[0]
        rows_N = rows_N.masked_fill((rows_N < 0) | (rows_N >= size), size)  # index `size`: row of another rank
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
            size = w.shape[0]  # also the padding index: tokens with rows on other ranks are skipped
            accumulate_grad(w, torch.ops.aten.embedding_dense_backward(dh_ND, rows_N, size + 1, size, False)[:size])

        defer(accumulate_weight_grads)
        return None, None, None, None
