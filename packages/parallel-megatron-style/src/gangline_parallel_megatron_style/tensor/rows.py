"""Hidden states as rows, in an order in which collectives need no copy.

Collectives concatenate along dim 0, and sequences are split along dim 1. So with sequence parallelism the rows are in
token-major order, (T, B, ...) in memory: a rank's part of the sequences is then consecutive rows, and all-gather and
reduce-scatter need no copy. A hidden state made of such rows has the shape (B, T, ...) for all modules.

B batch, T tokens of this cp rank's part of the sequence (t after tp has split it too), N = B·T rows, F features
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def to_rows(x: Tensor, tokens_first: bool) -> Tensor:
    """Flatten (B, T, F) to rows (N, F), a view if the memory order allows; without `tokens_first` any leading dims."""
    if tokens_first:
        x = x.transpose(0, 1)
    return x.reshape(-1, x.shape[-1])


def from_rows(rows_NF: Tensor, shape: Sequence[int], tokens_first: bool) -> Tensor:
    """View rows (N, F) as (B, T, F), with the leading dims of `shape`; with `tokens_first` T follows from N."""
    if not tokens_first:
        return rows_NF.view(*shape[:-1], -1)
    return rows_NF.view(-1, shape[0], *shape[2:-1], rows_NF.shape[-1]).transpose(0, 1)
