"""Triton kernels of float8 quantization, compared with plain PyTorch operators.

test_kernels.py runs this file under the Triton interpreter.
"""

from __future__ import annotations

import pytest
import torch

from gangline_parallel_megatron_style.precision.formats import Format, Grain
from gangline_parallel_megatron_style.precision.quantise import quantise


@pytest.fixture
def kernels(monkeypatch):
    """Return the module of the Triton kernels, with the Triton interpreter switched on."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from gangline_parallel_megatron_style.precision import quantise_triton

    return quantise_triton


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("grain", list(Grain))
@pytest.mark.parametrize("odd", [0.0, float("nan"), float("-inf")])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (33, 270), (257, 16)])
def test_kernels_match_plain_operators(kernels, monkeypatch, form, grain, odd, rows, columns):
    """Compare values that kernels return in float32, because the Triton interpreter rounds to float8 differently."""
    torch.manual_seed(rows)
    x = (torch.randn(rows, columns) * torch.randn(rows, 1).exp() * 10).bfloat16()
    x[rows // 2, columns // 3] = odd
    for given in (x, x.t().contiguous().t(), torch.cat((x, x), dim=1)[:, :columns]):
        ours = kernels.quantise(given, form, grain, torch.float32)
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        plain = quantise(given, form, grain)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert torch.equal(ours.scale, plain.scale)
        torch.testing.assert_close(
            ours.values.to(form.dtype).float(), plain.values.float(), rtol=0, atol=0, equal_nan=True
        )


def test_tiny_values_get_the_smallest_scale(kernels):
    found = kernels.quantise(torch.full((16, 16), 2.0**-130).bfloat16(), Format.E4M3, Grain.TENSOR, torch.float32)
    assert found.scale.item() == 2.0**-126


@pytest.mark.parametrize("grain", list(Grain))
def test_float32_is_not_rounded_to_bfloat16_first(kernels, monkeypatch, grain):
    x = torch.randn(33, 270)
    ours = kernels.quantise(x, Format.E4M3, grain, torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    plain = quantise(x, Format.E4M3, grain)
    assert torch.equal(ours.scale, plain.scale)
    assert torch.equal(ours.values.to(torch.float8_e4m3fn).float(), plain.values.float())
