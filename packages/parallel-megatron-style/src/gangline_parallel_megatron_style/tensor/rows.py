"""Hidden states as rows, in the order in which the parts of a sequence are concatenated.

Collectives concatenate along dim 0, and sequences are split along dim 1. So under sequence parallelism rows run over
the tokens first and the batch second, (T, B, ...) in memory: then a rank's part of a sequence is a run of rows, and
gather and scatter need no copy. A hidden state made of such rows has the shape (B, T, ...) for all readers.

B batch, T tokens of this rank's part of the sequence (t once tp has split it too), N = B·T rows, F features
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def to_rows(x: Tensor, tokens_first: bool) -> Tensor:
    """Flatten (B, T, F) to (N, F), contiguous; a view if memory allows. Without `tokens_first` any leading dims."""
    if tokens_first:
        x = x.transpose(0, 1)
    return x.reshape(-1, x.shape[-1])


def from_rows(rows_NF: Tensor, shape: Sequence[int], tokens_first: bool) -> Tensor:
    """View (N, F) as (B, T, F), with the leading dims of `shape`, but another T if the number of rows differs."""
    if not tokens_first:
        return rows_NF.view(*shape[:-1], -1)
    return rows_NF.view(-1, shape[0], *shape[2:-1], rows_NF.shape[-1]).transpose(0, 1)
