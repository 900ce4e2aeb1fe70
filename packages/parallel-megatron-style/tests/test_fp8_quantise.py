"""Float8 quantization: rounding errors, scales, zeros, very large values and NaN."""

from __future__ import annotations

import math

import pytest
import torch

from gangline_parallel_megatron_style.precision.formats import SMALLEST, Format, Grain
from gangline_parallel_megatron_style.precision.quantise import compute_scale, quantise

FORMATS = list(Format)
GRAINS = list(Grain)
MANTISSA = {Format.E4M3: 3, Format.E5M2: 2}
LARGEST = {Format.E4M3: 448.0, Format.E5M2: 57344.0}
LEAST_NORMAL = {Format.E4M3: 2.0**-6, Format.E5M2: 2.0**-14}


def draw(*shape: int, seed: int = 0, spread: float = 0.0) -> torch.Tensor:
    """Return normal random numbers in bfloat16, each multiplied by a random power of two from 2^-spread to 2^spread."""
    generator = torch.Generator().manual_seed(seed)
    powers = (torch.rand(shape, generator=generator) * 2 - 1).mul(spread).round()
    return (torch.randn(shape, generator=generator) * 2**powers).bfloat16()


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_formats_match_torch_finfo(form):
    found = torch.finfo(form.dtype)
    assert found.max == LARGEST[form] == 1.75 * 2.0**form.exponent
    assert found.smallest_normal == LEAST_NORMAL[form]
    assert found.eps == 2.0 ** -MANTISSA[form]


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("mantissa", [1.0, 1.5, 1.75, 1.75 + 2**-23, 2 - 2**-23])
def test_scale_is_smallest_power_of_two_that_fits(form, mantissa):
    largest = torch.tensor([mantissa * 2.0**exponent for exponent in range(-126, 128)])
    scale = compute_scale(largest, form)
    assert bool((torch.frexp(scale).mantissa == 0.5).all())
    assert bool((largest.double() / scale <= LARGEST[form]).all())
    tight = largest.double() / (scale / 2) > LARGEST[form]
    assert bool((tight | (scale == SMALLEST)).all())
    assert int(tight.sum()) > 230


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("grain", GRAINS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (16, 128), (130, 300)], ids=str)
def test_rounding_is_to_the_nearest(form, grain, shape):
    """Bound the error by half a unit in the last of m mantissa bits.

    The bound is 2^-(m+1) of the value, or of the least normal number for smaller values.
    """
    x = draw(*shape, spread=12)
    found = quantise(x, form, grain)
    back = found.dequantise()
    rows, columns = shape
    scale = found.scale.double().repeat_interleave(found.values.shape[0] // found.scale.shape[0], 0)
    scale = scale.repeat_interleave(found.values.shape[1] // found.scale.shape[1], 1)[:rows, :columns]
    exact, half_unit = x.double(), 2.0 ** -(MANTISSA[form] + 1)
    allowed = half_unit * torch.maximum(exact.abs(), scale * LEAST_NORMAL[form])
    assert bool(((back[:rows, :columns] - exact).abs() <= allowed).all())
    assert not back[rows:].any()
    assert not back[:, columns:].any()
    assert found.values.dtype == form.dtype
    assert found.values.is_contiguous()


@pytest.mark.parametrize("grain", GRAINS, ids=str)
def test_scale_depends_only_on_its_own_group(grain):
    """Change one value and check that only the scale of its group changes."""
    x = draw(256, 256)
    rows, columns = (side or 256 for side in grain.value)
    before = quantise(x, Format.E4M3, grain).scale
    x[200, 130] = 1e4
    after = quantise(x, Format.E4M3, grain).scale
    assert before.shape == (256 // rows, 256 // columns)
    assert [tuple(place) for place in (before != after).nonzero().tolist()] == [(200 // rows, 130 // columns)]


@pytest.mark.parametrize("grain", GRAINS, ids=str)
def test_shard_quantises_as_the_full_matrix(grain):
    """Check values that are normal numbers in e4m3, which covers 14 powers of two; smaller values round differently."""
    x = draw(256, 256)
    x = torch.where(x.abs() < 2.0**-9, 2.0**-9, x)  # the largest value is below 2^3
    whole = quantise(x, Format.E4M3, grain).dequantise()
    for first in range(0, 256, 64):
        assert quantise(x[first : first + 64], Format.E4M3, grain).dequantise()[:64].equal(whole[first : first + 64])
    small = torch.where(x.abs() < 2.0**-9 * 1.5, x * 2.0**-8, x)
    assert (
        not quantise(small, Format.E4M3, Grain.TENSOR)
        .dequantise()
        .equal(quantise(small, Format.E5M2, Grain.TENSOR).dequantise())
    )


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("grain", GRAINS, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-38, 3e-5, 3e38])
def test_finite_values_stay_finite(form, grain, value):
    x = torch.full((3, 5), value).bfloat16()
    back = quantise(x, form, grain).dequantise()[:3, :5]
    assert bool(back.isfinite().all())
    assert bool(((back - x.float()).abs() <= 2.0 ** -(MANTISSA[form] + 1) * x.float()).all())


def payload(bits: int) -> torch.Tensor:
    return torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16)


NOT_FINITE = {
    "infinity": torch.tensor([math.inf]).bfloat16(),
    "-infinity": torch.tensor([-math.inf]).bfloat16(),
    "nan": torch.tensor([math.nan]).bfloat16(),
    "nan, all bits set": payload(0x7FFF),
    "-nan, all bits set": payload(-1),
}


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("grain", GRAINS, ids=str)
@pytest.mark.parametrize("name", NOT_FINITE)
def test_non_finite_value_makes_its_group_nan(form, grain, name):
    """Check infinities too: e4m3 has no infinity, and torch would convert it to 448."""
    x = draw(256, 256)
    x[200, 130] = NOT_FINITE[name][0]
    back = quantise(x, form, grain).dequantise()
    rows, columns = (side or 256 for side in grain.value)
    lost = torch.zeros(256, 256, dtype=torch.bool)
    row, column = 200 // rows * rows, 130 // columns * columns
    lost[row : row + rows, column : column + columns] = True
    assert bool(back[lost].isnan().all())
    assert bool(back[~lost].isfinite().all())


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("bits", [0x7F800000, 0x7FC00000, 0x7FFFFFFF, -1], ids=hex)
def test_scale_of_non_finite_values_is_infinite(form, bits):
    """Check several NaNs as the largest value: on a GPU, all bits of a NaN are set."""
    largest = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert bool(compute_scale(largest, form).isposinf().all())
