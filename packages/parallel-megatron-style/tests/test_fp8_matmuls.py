"""The three matmuls of `precision=fp8`: error bounds, bit identity with scaled matmuls, any shape."""

from __future__ import annotations

import math

import pytest
import torch
from test_fp8_quantise import LEAST_NORMAL, MANTISSA, NOT_FINITE, draw

from gangline_parallel_megatron_style.precision.formats import Format, Grain, Quantised
from gangline_parallel_megatron_style.precision.fp8 import RECIPES, Fp8Precision
from gangline_parallel_megatron_style.precision.multiply import multiply
from gangline_parallel_megatron_style.precision.quantise import quantise

SCALINGS = list(RECIPES)
SHAPES = [((3,), 24, 16), ((2, 5), 70, 33), ((130,), 300, 140), ((), 8, 5), ((1, 1, 7), 128, 256)]
U_BF16 = 2.0**-8  # half a unit in the last place of the result


def matmuls(precision, x, w, dy):
    """Return name -> (result of the precision, operands as matrices (M, K) and (N, K), format of the first operand)."""
    rows, above = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    form = precision.recipe.gradients
    return {
        "y": (precision.linear(x, w).reshape(-1, w.shape[0]), rows, w, Format.E4M3),
        "dx": (precision.compute_grad_x(dy, w).reshape(-1, w.shape[1]), above, w.t(), form),
        "dw": (precision.compute_grad_w(dy, x), above.t(), rows.t(), form),
    }


def operands(lead, inside, out, spread=3.0):
    return (
        draw(*lead, inside, seed=1, spread=spread),
        draw(out, inside, seed=2),
        draw(*lead, out, seed=3, spread=spread),
    )


def rounding(a, form):
    """Return the bound on the rounding error of each number.

    The bound is 2^-(m+1) of the number, or of the smallest normal number under the largest possible scale. A scale is
    less than 2 max / 448 (2 max / 57344), because it is the smallest power of two that fits. A group that shares a
    scale is at most the full matrix.
    """
    exact = a.double()
    scale = 2 * exact.abs().amax() / torch.finfo(form.dtype).max
    return 2.0 ** -(MANTISSA[form] + 1) * torch.maximum(exact.abs(), scale * LEAST_NORMAL[form])


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matmul_errors_are_within_format_bounds(scaling, shape):
    """Check |Σ (a+δa)(b+δb) - Σ ab| <= Σ |a||δb| + |b||δa| + |δa||δb|, plus K float32 roundings and one of bfloat16."""
    x, w, dy = operands(*shape)
    for name, (got, a, b, form) in matmuls(Fp8Precision(RECIPES[scaling]), x, w, dy).items():
        exact = a.double() @ b.double().t()
        da, db = rounding(a, form), rounding(b, Format.E4M3)
        size_a, size_b = a.double().abs() + da, b.double().abs() + db
        moved = size_a @ size_b.t() - a.double().abs() @ b.double().abs().t()
        summed = a.shape[1] * 2.0**-24 * (size_a @ size_b.t())
        allowed = (moved + summed) * (1 + U_BF16) + U_BF16 * exact.abs()
        assert got.dtype == torch.bfloat16
        assert got.shape == exact.shape
        assert bool(((got.double() - exact).abs() <= allowed).all()), name


@pytest.mark.parametrize("scaling", SCALINGS)
def test_matmul_rms_error_matches_float8_precision(scaling):
    """Compare with √((u_a² + u_b²) / 3), because the errors of many terms add up as squares.

    An error that is uniform in ±u has the root mean square u/√3. Here u is the bound at the lower end of each power of
    two, so the expected value is slightly too large, and a third of it is too small.
    """
    x, w, dy = operands((256,), 300, 256, spread=0)
    for name, (got, a, b, form) in matmuls(Fp8Precision(RECIPES[scaling]), x, w, dy).items():
        exact = a.double() @ b.double().t()
        u_a, u_b = 2.0 ** -(MANTISSA[form] + 1), 2.0**-4
        expected = math.sqrt((u_a**2 + u_b**2) / 3)
        apart = float((got.double() - exact).norm() / exact.norm())
        assert expected / 3 < apart < expected, name


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_backward_equals_separate_input_and_weight_gradients(scaling, biased):
    precision = Fp8Precision(RECIPES[scaling])
    x, w, dy = operands((2, 5), 70, 33)
    b = draw(33, seed=4) if biased else None
    leaves = [t.requires_grad_() for t in (x, w, b) if t is not None]
    y = precision.linear(x, w, b)
    found = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        assert found[0].equal(precision.compute_grad_x(dy, w))
        assert found[1].equal(precision.compute_grad_w(dy, x))
        assert y.equal(precision.linear(x, w) + (b if biased else 0))
        assert not biased or found[2].equal(dy.flatten(0, -2).sum(0))
    assert not y._is_view(), "who adds up the parts of ranks writes into them"


def test_inputs_in_float32_are_rounded_to_bfloat16_first():
    """Check that float32 inputs give the same bits as bfloat16 inputs, so that all strategies give the same bits."""
    precision = Fp8Precision(RECIPES["row"])
    x, w, dy = (t.float() * 1.001 for t in operands((4,), 40, 24))
    x.requires_grad_()
    y = precision.linear(x, w)
    assert y.equal(precision.linear(x.bfloat16(), w.bfloat16()))
    (dx,) = torch.autograd.grad(y, x, dy.bfloat16())
    assert dx.dtype == torch.float32
    assert dx.equal(precision.compute_grad_x(dy.bfloat16(), w.bfloat16()).float())


# --- comparison with torch._scaled_mm ---


def scaled_mm(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    return torch._scaled_mm(
        a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t().contiguous(), out_dtype=dtype
    )  # the transpose of a single scale is the same scale


def exactly_summed(*shape: int, seed: int) -> torch.Tensor:
    """Return integers of at most 8 times a power of two per row, whose float32 sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-8, 9, shape, generator=generator)
    return (integers * 2.0 ** torch.randint(-3, 4, (shape[0], 1), generator=generator)).bfloat16()


@pytest.mark.parametrize("grain", [Grain.TENSOR, Grain.ROW], ids=str)
@pytest.mark.parametrize("forms", [("E4M3", "E4M3"), ("E5M2", "E4M3")], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(5, 7, 3), (64, 256, 48), (130, 200, 70)], ids=str)
def test_emulation_is_bit_identical_to_scaled_mm(grain, forms, dtype, shape):
    (m, k, n), (first, second) = shape, (Format[form] for form in forms)
    a, b = (quantise(exactly_summed(*side, seed=7), form, grain) for side, form in (((m, k), first), ((n, k), second)))
    assert multiply(a, b, dtype).equal(scaled_mm(a, b, dtype))
    a, b = quantise(draw(m, k, seed=1), first, grain), quantise(draw(n, k, seed=2), second, grain)
    in_any_order = 2 * k * 2.0**-24 * (a.dequantise().double().abs() @ b.dequantise().double().abs().t())
    apart = (multiply(a, b, torch.float32).double() - scaled_mm(a, b, torch.float32).double()).abs()
    assert bool((apart <= in_any_order).all())


@pytest.mark.parametrize("second", [Grain.TILE, Grain.BLOCK], ids=str)
@pytest.mark.parametrize("exact", [True, False])
def test_blocks_are_scaled_and_summed_in_float32(second, exact):
    """Compare with DeepSeek-V3 (section 3.3.2): one matmul for each 128 terms of the sum, scaled, then added."""
    made = exactly_summed if exact else draw
    a = quantise(made(130, 300, seed=1), Format.E4M3, Grain.TILE)
    b = quantise(made(140, 300, seed=2), Format.E4M3, second)
    total = torch.zeros(a.values.shape[0], b.values.shape[0])
    for index in range(3):
        part = slice(128 * index, 128 * index + 128)
        scaled = torch._scaled_mm(
            a.values[:, part].contiguous(),
            b.values[:, part].contiguous().t(),
            scale_a=torch.tensor(1.0),
            scale_b=torch.tensor(1.0),
            out_dtype=torch.float32,
        )
        columns = b.scale[:, index].repeat_interleave(b.values.shape[0] // b.scale.shape[0])
        total += scaled * a.scale[:, index, None] * columns
    found = multiply(a, b, torch.float32)
    if exact:
        assert found.equal(total)
    sizes = a.dequantise().double().abs() @ b.dequantise().double().abs().t()
    assert bool(((found - total).double().abs() <= 2 * 384 * 2.0**-24 * sizes).all())


# --- edge cases ---


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", NOT_FINITE)
@pytest.mark.parametrize("place", ["x", "w", "dy"])
def test_non_finite_inputs_give_non_finite_outputs(scaling, name, place):
    """Check that outputs are non-finite wherever float32 outputs are non-finite."""
    x, w, dy = operands((2, 65), 140, 150)
    {"x": x, "w": w, "dy": dy}[place][-1, ..., -1] = NOT_FINITE[name][0]
    for name, (got, a, b, _) in matmuls(Fp8Precision(RECIPES[scaling]), x, w, dy).items():
        lost = ~(a.float() @ b.float().t()).isfinite()
        assert bool(lost.any()) == (place in {"y": "xw", "dx": ("dy", "w"), "dw": ("dy", "x")}[name])
        assert not got[lost].isfinite().any(), name
        assert bool(lost.any()) or bool(got.isfinite().all())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zero_inputs_give_zero_outputs(scaling):
    precision = Fp8Precision(RECIPES[scaling])
    x, w, dy = operands((4,), 40, 24)
    for found in (precision.linear(x * 0, w), precision.compute_grad_x(dy * 0, w), precision.compute_grad_w(dy, x * 0)):
        assert not found.any()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [((0,), 24, 16), ((2, 0), 24, 16), ((3,), 0, 16), ((2, 3), 24, 0)], ids=str)
def test_empty_operands_give_empty_or_zero_outputs(scaling, shape):
    precision = Fp8Precision(RECIPES[scaling])
    lead, inside, out = shape
    x, w = torch.ones(*lead, inside).bfloat16().requires_grad_(), torch.ones(out, inside).bfloat16().requires_grad_()
    y = precision.linear(x, w)
    dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert (y.shape, dx.shape, dw.shape) == ((*lead, out), x.shape, w.shape)
    assert not any(bool(t.any()) for t in (y, dx, dw))


def test_torch_compile_has_no_graph_breaks():
    """Check that torch.compile traces one graph, and that the traced function is bit-identical."""
    precision = Fp8Precision(RECIPES["block"])
    x, w, dy = operands((2, 5), 70, 33)
    leaves = [x.requires_grad_(), w.requires_grad_()]
    compiled = torch.compile(lambda x, w: precision.linear(x, w), fullgraph=True, backend="eager")
    got, want = compiled(x, w), precision.linear(x, w)
    assert got.equal(want)
    for mine, theirs in zip(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy), strict=True):
        assert mine.equal(theirs)
