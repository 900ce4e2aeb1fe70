"""Gradient norm and clipping: the same bits for every row split, and the norm of torch otherwise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from gangline_basics.parallel.norm import MeasuredNorm, clip, compute_global_norm, compute_norm, sum_row_squares


def gradients(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(33, 17), (5,), (3, 4, 129), (), (1, 1)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@given(st.integers(0, 33), st.integers(0, 12), st.integers(0, 1000))
def test_norm_does_not_depend_on_row_split(cut, cut_stack, seed):
    whole = gradients(seed)
    pieces = [
        torch.cat((sum_row_squares(whole[0][:cut]), sum_row_squares(whole[0][cut:]))),
        sum_row_squares(whole[1]),
        torch.cat([sum_row_squares(part) for part in whole[2].reshape(12, 129).split([cut_stack, 12 - cut_stack])]),
        sum_row_squares(whole[3]),
        sum_row_squares(whole[4]),
    ]
    assert compute_norm(pieces).equal(compute_global_norm(whole, deterministic=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_global_norm_matches_formula(deterministic, dtype):
    whole = gradients(dtype=dtype)
    expected = math.sqrt(sum(float(x.double().square().sum()) for x in whole))
    assert float(compute_global_norm(whole, deterministic)) == pytest.approx(
        expected, rel=1e-2 if dtype == torch.bfloat16 else 1e-6
    )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradient_gives_non_finite_norm(deterministic, bad):
    whole = gradients()
    whole[2][1, 2, 3] = bad
    assert not math.isfinite(compute_global_norm(whole, deterministic))


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e9])
@pytest.mark.parametrize("deterministic", [False, True])
def test_clipping_matches_torch(max_norm, deterministic):
    ours, theirs = ([torch.zeros_like(x).requires_grad_() for x in gradients()] for _ in range(2))
    for one, other, gradient in zip(ours, theirs, gradients(), strict=True):
        one.grad, other.grad = gradient.clone(), gradient.clone()
    norm = compute_global_norm([x.grad for x in ours], deterministic)
    clip(ours, max_norm, norm, float(norm))
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    close = 1e-6 if deterministic else 0.0
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=close, atol=0)


def test_clipping_keeps_gradients_below_max_norm():
    x = torch.zeros(2).requires_grad_()
    x.grad = torch.tensor([0.3, 0.4])
    clip([x], 1.0, torch.tensor(0.5), 0.5)
    assert x.grad.tolist() == pytest.approx([0.3, 0.4])
    clip([x], 0.25, torch.tensor(0.5), 0.5)
    assert x.grad.tolist() == pytest.approx([0.15, 0.2], rel=1e-4)


def measured_norm(is_local, squares=(0.3, 0.4)):
    x = torch.zeros(2).requires_grad_()
    x.grad = torch.tensor(squares)
    norm = MeasuredNorm([("x", x)], lambda: compute_global_norm([x.grad], False), is_local)
    norm.measure()
    return x, norm


def multiply(x):
    x.grad *= 10


def multiply_all(x):
    torch._foreach_mul_([x.grad], 10)


def replace(x):
    x.grad = x.grad * 10


WRITES = [multiply, multiply_all, replace]


@pytest.mark.parametrize("write", WRITES)
def test_clip_recomputes_norm_after_gradient_write(write):
    x, norm = measured_norm(is_local=True)
    write(x)
    assert norm.clip(1.0) == pytest.approx(5.0)
    assert x.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)


@pytest.mark.parametrize("write", WRITES)
def test_clip_after_write_to_sharded_gradient_raises(write):
    x, norm = measured_norm(is_local=False)
    write(x)
    with pytest.raises(RuntimeError, match=r"gradient of x was written .*remeasure"):
        norm.clip(1.0)
    norm.discard()
    assert norm.clip(1.0) == pytest.approx(5.0)


def test_clip_without_gradient_write_reuses_measured_norm():
    _, norm = measured_norm(is_local=False)
    norm.value = 7.0
    assert norm.clip(None) == 7.0


def test_clip_twice_measures_the_clipped_gradients():
    _, norm = measured_norm(is_local=False, squares=(3.0, 4.0))
    assert norm.clip(1.0) == pytest.approx(5.0)
    assert norm.clip(1.0) == pytest.approx(1.0, rel=1e-5)
