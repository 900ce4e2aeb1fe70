"""Permutation that sorts (token, expert) pairs by expert, used for dispatch and combine; drops pairs over capacity.

N tokens, k experts per token, E experts, A = N·k pairs (minus pairs without an expert), D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gangline_basics.model.kernels import takes_kernels

MOST = 16  # maximum number of experts per token for the kernels, which unroll their loop over a token's experts


@dataclass(frozen=True)
class Permutation:
    """(token, expert) pairs sorted by expert; within an expert tokens keep their order.

    token_A   the token of each sorted pair
    place_Nk  row index of the pair of token n and its j-th expert; -1: no row
    bounds    (E + 1,) int64: the rows of expert e are bounds[e] to bounds[e + 1]
    whole     true if every pair has a row
    """

    token_A: Tensor
    place_Nk: Tensor
    bounds: Tensor
    whole: bool

    @property
    def counts(self) -> Tensor:
        """Number of pairs per expert, shape (E,)."""
        return self.bounds.diff()


def sort_by_expert(expert_Nk: Tensor, experts: int, whole: bool = True) -> Permutation:
    """Sort the pairs by expert. With whole=False, the index `experts` means a pair without an expert."""
    N, k = expert_Nk.shape
    flat = expert_Nk.reshape(-1)
    order = torch.argsort(flat, stable=True)
    edges = torch.arange(experts + 1, device=flat.device)
    bounds = torch.searchsorted(flat[order], edges)
    place = torch.empty_like(order)
    place[order] = torch.arange(N * k, device=flat.device)
    whole = whole or flat.is_meta  # on the meta device drops are unknown
    if not whole:
        order = order[: int(bounds[-1])]
        place = torch.where(flat < experts, place, -1)
    return Permutation(order // k, place.view(N, k), bounds, whole)


def drop_over_capacity(expert_Nk: Tensor, experts: int, capacity: int) -> Tensor:
    """Return `expert_Nk` with `experts` (no expert) for each pair after the first `capacity` pairs of its expert."""
    flat = expert_Nk.reshape(-1)
    permutation = sort_by_expert(expert_Nk, experts, whole=False)
    before = permutation.place_Nk.reshape(-1) - permutation.bounds[:-1][flat.clamp(max=experts - 1)]
    return torch.where(before < capacity, flat, experts).view_as(expert_Nk)


class Permute(torch.autograd.Function):
    """Permute x (N, D) -> rows (A, D), one per pair. Backward sums a token's gradients in the order of its experts."""

    @staticmethod
    def forward(ctx, x_ND: Tensor, made: Permutation) -> Tensor:
        ctx.made = made
        return x_ND.index_select(0, made.token_A)

    @staticmethod
    @once_differentiable
    def backward(ctx, drows_AD: Tensor):
        return gather_rows(drows_AD, ctx.made, None), None


class Combine(torch.autograd.Function):
    """Combine rows (A, D), weights (N, k) -> (N, D): the weighted sum of each token's rows in the order of its experts.

    Sums are in the wider dtype of rows and weights, the output in the dtype of the rows.
    """

    @staticmethod
    def forward(ctx, rows_AD: Tensor, weight_Nk: Tensor, made: Permutation) -> Tensor:
        ctx.made = made
        ctx.save_for_backward(rows_AD, weight_Nk)
        return gather_rows(rows_AD, made, weight_Nk)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_ND: Tensor):
        rows_AD, weight_Nk = ctx.saved_tensors
        permutation: Permutation = ctx.made
        if _takes_kernels(rows_AD, permutation):
            from gangline_moe.dispatch import permute_triton

            return *permute_triton.gather_gradients(dy_ND, rows_AD.contiguous(), permutation.place_Nk, weight_Nk), None
        dweight_Nk = torch.zeros_like(weight_Nk)
        flat = weight_Nk.new_empty(len(rows_AD))
        for j in range(weight_Nk.shape[1]):
            row, place, mask = _gather_column(rows_AD, permutation, j)
            dot = (dy_ND * row).sum(-1, dtype=weight_Nk.dtype)
            dweight_Nk[:, j] = dot if mask is None else torch.where(mask, dot, 0)
            if mask is None:
                flat[place] = weight_Nk[:, j]
            else:
                flat[place[mask]] = weight_Nk[:, j][mask]
        drows_AD = dy_ND.index_select(0, permutation.token_A) * flat.to(dy_ND.dtype)[:, None]
        return drows_AD, dweight_Nk, None


def gather_rows(rows_AD: Tensor, made: Permutation, weight_Nk: Tensor | None) -> Tensor:
    """Return Σ_j weight[n, j] · rows[place[n, j]], (N, D), added in the order of j."""
    if _takes_kernels(rows_AD, made):
        from gangline_moe.dispatch import permute_triton

        return permute_triton.gather_rows(rows_AD, made.place_Nk, weight_Nk)
    kind = rows_AD.dtype if weight_Nk is None else torch.promote_types(rows_AD.dtype, weight_Nk.dtype)
    total: Tensor | None = None
    for j in range(made.place_Nk.shape[1]):
        row, _, mask = _gather_column(rows_AD, made, j)
        if mask is not None:
            row = torch.where(mask[:, None], row, 0)
        if weight_Nk is None:
            total = row if total is None else total.add_(row)
        elif total is None:
            total = row.to(kind) * weight_Nk[:, j : j + 1]
        else:
            total.addcmul_(row.to(kind), weight_Nk[:, j : j + 1])
    assert total is not None
    return total.to(rows_AD.dtype)


def _takes_kernels(rows_AD: Tensor, made: Permutation) -> bool:
    """Return whether the Triton kernels run, which they do for at most MOST experts per token.

    With expert choice the number of experts per token changes from batch to batch, and compiling both kernels for
    128 experts takes half a minute.
    """
    return made.place_Nk.shape[1] <= MOST and takes_kernels(rows_AD)


def _gather_column(rows_AD: Tensor, made: Permutation, j: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows and row indices of each token's j-th pair, and a mask of tokens with such a pair (None: all)."""
    place = made.place_Nk[:, j]
    if made.whole:
        return rows_AD.index_select(0, place), place, None
    kept = place >= 0
    if not len(rows_AD):
        return rows_AD.new_zeros(len(place), rows_AD.shape[1]), place, kept
    return rows_AD.index_select(0, place.clamp(min=0)), place, kept
