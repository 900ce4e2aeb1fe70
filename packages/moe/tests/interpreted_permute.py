"""Triton kernels for the rows of experts, compared with plain PyTorch operators.

test_kernels.py runs this file under the Triton interpreter.
"""

from __future__ import annotations

import pytest
import torch

from gangline_moe.dispatch.permute import MOST, Combine, Permute, sort_by_expert


@pytest.mark.parametrize(("tokens", "k", "experts", "width"), [(1, 1, 1, 1), (7, 2, 4, 33), (12, 3, 5, 2050)])
@pytest.mark.parametrize("dropped", [False, True])
def test_kernels_match_plain_operators(monkeypatch, tokens, k, experts, width, dropped):
    torch.manual_seed(tokens)
    made = sort_by_expert(torch.randint(experts + dropped, (tokens, k)), experts, whole=not dropped)
    x, weight = torch.randn(tokens, width, requires_grad=True), torch.rand(tokens, k, requires_grad=True)
    scale, dy = torch.rand(len(made.token_A), 1), torch.randn(width, tokens).t()
    results = []
    for interpreted in ("1", "0"):
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
        y = Combine.apply(Permute.apply(x, made) * scale, weight, made)
        results.append([y, *torch.autograd.grad(y, (x, weight), dy)])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_kernels_without_rows_return_zeros(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    made = sort_by_expert(torch.full((3, 2), 4), 4, whole=False)  # all pairs are dropped
    x, weight = torch.randn(3, 8, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    y = Combine.apply(Permute.apply(x, made), weight, made)
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert not y.any()
    assert not dx.any()
    assert not dweight.any()


def test_large_top_k_uses_plain_operators(monkeypatch):
    """Check k above `MOST`: expert choice changes k from batch to batch, and each k would compile a kernel."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from gangline_moe.dispatch import permute_triton

    calls = []
    for name in ("gather_rows", "gather_gradients"):
        own = getattr(permute_triton, name)
        monkeypatch.setattr(permute_triton, name, lambda *a, own=own: calls.append(a[-1].shape[1]) or own(*a))
    for k in (MOST, MOST + 1):
        made = sort_by_expert(torch.arange(k).expand(3, k), k)
        rows, weight = torch.randn(3 * k, 4, requires_grad=True), torch.rand(3, k, requires_grad=True)
        Combine.apply(rows, weight, made).sum().backward()
    assert calls == [MOST, MOST]
