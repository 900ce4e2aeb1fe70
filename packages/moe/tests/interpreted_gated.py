"""Triton kernels of the experts' gated product, compared with plain PyTorch operators.

test_kernels.py runs this file under the Triton interpreter.
"""

from __future__ import annotations

import pytest
import torch

from gangline_basics.model.gating import SWIGLU, Gating
from gangline_moe.experts import GatedMatmuls
from gangline_moe.gated import compute_gradients, join
from gangline_moe.matmuls import PlainMatmuls


@pytest.fixture
def calls(monkeypatch):
    """Interpret kernels, and return the names of those called."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from gangline_moe import gated_triton

    called = []
    for name in ("join", "compute_gradients"):
        own = getattr(gated_triton, name)
        monkeypatch.setattr(gated_triton, name, lambda *a, own=own, name=name: called.append(name) or own(*a))
    return called


@pytest.mark.parametrize("rows", [0, 1, 5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_match_float64(calls, rows, dtype):
    torch.manual_seed(rows)
    gate, up, dh = (torch.randn(33, rows, dtype=dtype).t() * 4 for _ in range(3))  # not contiguous
    wide_gate, wide_up = (x.double().requires_grad_() for x in (gate, up))
    product = torch.nn.functional.silu(wide_gate) * wide_up
    expected = [product.detach(), *torch.autograd.grad(product, (wide_gate, wide_up), dh.double())]
    joined = join(SWIGLU, gate, up)
    gated = compute_gradients(SWIGLU, gate, up, dh.clone())
    assert calls == ["join", "compute_gradients"]
    assert torch.equal(joined, gated[0])
    for ours, want in zip(gated, expected, strict=True):
        assert ours.dtype == dtype
        bound = 2**-7 if dtype == torch.bfloat16 else 1e-6  # the interpreter truncates to bfloat16
        torch.testing.assert_close(ours.double(), want, rtol=bound, atol=bound)


def test_gated_matmuls_match_plain_operators(calls, monkeypatch):
    torch.manual_seed(0)
    bounds = torch.tensor([0, 3, 3, 7])
    x, dy = torch.randn(7, 6, requires_grad=True), torch.randn(7, 6)
    weights = [torch.nn.Parameter(torch.randn(3, *shape)) for shape in ((5, 6), (5, 6), (6, 5))]
    results = []
    for interpreted in ("1", "0"):
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
        y = GatedMatmuls.apply(x, *weights, None, None, None, bounds, PlainMatmuls(), SWIGLU)
        results.append([y, *torch.autograd.grad(y, (x, *weights), dy)])
    assert calls == ["join", "compute_gradients"]
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_other_gatings_and_float64_take_plain_operators(calls):
    gate, up, dh = (torch.randn(4, 3) for _ in range(3))
    for gating in (Gating(slope=1.702, limit=7.0, offset=1.0), Gating(limit=1.0)):
        join(gating, gate, up)
        compute_gradients(gating, gate, up, dh.clone())
    join(SWIGLU, gate.double(), up.double())
    compute_gradients(SWIGLU, gate.double(), up.double(), dh.double())
    assert not calls
