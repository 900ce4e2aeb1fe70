"""Hidden states as rows, in the order in which parts of a sequence lie one after another.

Collectives join along dim 0 and sequences are cut along dim 1. So under sequence parallelism rows run over the tokens
first and the batch second, (T, B, ...) in memory: then what a rank holds of a sequence is a run of rows, and nothing is
copied to gather or to scatter. A hidden state made of such rows is (B, T, ...) to all who look at it.

B batch, T tokens of this rank's part of the sequence (t once tp has cut it too), N = B·T rows, F features
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def to_rows(x: Tensor, tokens_first: bool) -> Tensor:
    """(B, T, F) -> (N, F), contiguous; a view where memory allows. Without `tokens_first` leading dims are free."""
    if tokens_first:
        x = x.transpose(0, 1)
    return x.reshape(-1, x.shape[-1])


def from_rows(rows_NF: Tensor, shape: Sequence[int], tokens_first: bool) -> Tensor:
    """(N, F) -> (B, T, F), a view, with the leading dims of `shape`, though another T where rows are more or fewer."""
    if not tokens_first:
        return rows_NF.view(*shape[:-1], -1)
    return rows_NF.view(-1, shape[0], *shape[2:-1], rows_NF.shape[-1]).transpose(0, 1)
