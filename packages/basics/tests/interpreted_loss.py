"""Triton kernels of the loss, compared with plain PyTorch operators.

test_kernels.py runs this file under the Triton interpreter.
"""

from __future__ import annotations

import pytest
import torch

from gangline_basics.model import loss
from gangline_basics.model.kernels import takes_kernels


@pytest.fixture
def kernels(monkeypatch):
    """Kernels of the loss, run by the Triton interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from gangline_basics.model import loss_triton

    return loss_triton


def made(rows: int, vocabulary: int) -> tuple[torch.Tensor, ...]:
    """Return logits, targets, a mask of targets in this vocabulary shard, and per-row gradients of loss and z-loss."""
    torch.manual_seed(rows)
    here = torch.rand(rows) < 0.6
    return (
        torch.randn(rows, vocabulary) * 4,
        torch.randint(vocabulary, (rows,)),
        here,
        torch.rand(rows),
        torch.rand(rows),
    )


@pytest.mark.parametrize("vocabulary", [1, 100, 8192, 9001])
@pytest.mark.parametrize("rows", [1, 5])
def test_kernels_match_plain_operators(kernels, monkeypatch, rows, vocabulary):
    logits, targets, here, each, z = made(rows, vocabulary)
    wider = torch.cat((logits, logits), dim=1)[:, :vocabulary]  # a view whose rows are not adjacent in memory
    assert takes_kernels(logits)
    lse = loss.log_sum_exp(wider)
    cases = [(h, each, lse, y) for h in (None, here) for y in (None, z)]
    found = [loss.compute_logits_gradient(wider, targets, *case) for case in cases]
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not takes_kernels(logits)
    torch.testing.assert_close(lse, loss.log_sum_exp(logits), rtol=1e-6, atol=1e-6)
    for case, gradient in zip(cases, found, strict=True):
        torch.testing.assert_close(gradient, loss.compute_logits_gradient(logits, targets, *case), rtol=1e-5, atol=1e-6)


def test_non_finite_logits_give_non_finite_results(kernels):
    logits, targets, _, each, _ = made(3, 100)
    logits[0, 5], logits[1, 7] = float("nan"), float("inf")
    lse = loss.log_sum_exp(logits)
    gradient = loss.compute_logits_gradient(logits, targets, None, each, lse, None)
    assert lse.isfinite().tolist() == [False, False, True]
    assert gradient.isfinite().all(dim=1).tolist() == [False, False, True]


def test_cross_entropy_matches_plain_operators(kernels, monkeypatch):
    torch.manual_seed(1)
    hidden, weight = torch.randn(2, 9, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets, mask = torch.randint(50, (2, 9)), torch.rand(2, 9) < 0.7
    results = []
    for interpreted in (True, False):
        if not interpreted:
            monkeypatch.delenv("TRITON_INTERPRET")
        for chunk in (None, 4):
            total = loss.CrossEntropy(chunk=chunk)(hidden, weight, targets, mask)
            results.append([total, *torch.autograd.grad(total, (hidden, weight))])
    for one in results[:-1]:
        for ours, plain in zip(one, results[-1], strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_float64_uses_plain_operators(kernels):
    assert not takes_kernels(torch.zeros(1, dtype=torch.float64))
    assert not takes_kernels(torch.zeros(1, device="meta"))


def test_infinite_logits_match_plain_log_sum_exp(kernels, monkeypatch):
    """Check rows with one complete block, or the complete row, at minus infinity."""
    logits = torch.randn(5, 9001)
    logits[0, :8192] = logits[1, 8192:] = logits[2] = -float("inf")
    logits[3, 7] = float("inf")
    logits[4] -= 1000
    found = loss.log_sum_exp(logits)
    monkeypatch.delenv("TRITON_INTERPRET")
    torch.testing.assert_close(found, loss.log_sum_exp(logits), rtol=1e-6, atol=1e-6)
