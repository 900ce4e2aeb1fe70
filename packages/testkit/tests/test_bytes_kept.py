"""What the kit counts of the memory of a forward pass, where it can be said by hand."""

from __future__ import annotations

import torch

from gangline_testkit import bytes_kept


def test_each_piece_of_memory_counts_once_and_what_is_known_does_not() -> None:
    x, w = torch.ones(3, 5, requires_grad=True), torch.ones(5, 7, requires_grad=True)
    assert bytes_kept([w], lambda: x @ w) == 15 * 4
    assert bytes_kept([x, w], lambda: x @ w) == 0
    assert bytes_kept([], lambda: x @ w) == (15 + 35) * 4
    assert bytes_kept([], lambda: x.T @ x) == 15 * 4  # a view is of the same memory
    assert (
        bytes_kept([x], lambda: torch.exp(torch.exp(x))) == 2 * 15 * 4
    )  # a result that is freed too early is no one's
