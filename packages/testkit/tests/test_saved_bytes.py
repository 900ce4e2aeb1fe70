"""`count_saved_bytes`: bytes saved by a forward pass, compared with a count by hand."""

from __future__ import annotations

import torch

from gangline_testkit import count_saved_bytes


def test_kept_bytes_count_new_storages_once() -> None:
    x, w = torch.ones(3, 5, requires_grad=True), torch.ones(5, 7, requires_grad=True)
    assert count_saved_bytes([w], lambda: x @ w) == 15 * 4
    assert count_saved_bytes([x, w], lambda: x @ w) == 0
    assert count_saved_bytes([], lambda: x @ w) == (15 + 35) * 4
    assert count_saved_bytes([], lambda: x.T @ x) == 15 * 4  # a view is of the same memory
    assert (
        count_saved_bytes([x], lambda: torch.exp(torch.exp(x))) == 2 * 15 * 4
    )  # a result that is freed too early is no one's
