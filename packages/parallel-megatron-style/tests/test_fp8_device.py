"""`precision=fp8` and devices: operand layouts that pass torch's checks, and unsupported GPUs refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gangline.errors import UserError
from gangline_parallel_megatron_style.precision import device
from gangline_parallel_megatron_style.precision.config import Fp8
from gangline_parallel_megatron_style.precision.fp8 import RECIPES, Fp8Precision, build
from gangline_testkit.runs import build_small_run


@pytest.mark.parametrize("scaling", RECIPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 24, 16), (130, 200, 70), (128, 256, 384), (128, 640, 128)], ids=str)
def test_scaled_mm_operands_pass_torch_layout_checks(scaling, shape, monkeypatch):
    """Check operands on the `meta` device, where torch checks sizes, strides and scales as before a call of cuBLAS."""
    seen = []
    real = F.scaled_mm

    def scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, **more):
        seen.append((a.dtype, b.dtype, recipe_a.name, recipe_b.name, more["output_dtype"]))
        return real(a, b, scale_a, recipe_a, scale_b, recipe_b, **more)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    tokens, inside, out = shape
    x = torch.empty(tokens, inside, dtype=torch.bfloat16, device="meta", requires_grad=True)
    w = torch.empty(out, inside, dtype=torch.bfloat16, device="meta", requires_grad=True)
    y = Fp8Precision(RECIPES[scaling]).linear(x, w)
    y.backward(torch.empty_like(y))
    assert (y.shape, x.grad.shape, w.grad.shape) == ((tokens, out), x.shape, w.shape)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    above = e5m2 if scaling == "tensor" else e4m3
    tensor, row, tile, block = "TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128"
    first, second, third = {
        "tensor": ((tensor, tensor),) * 3,
        "row": ((row, row),) * 3,
        "block": ((tile, block), (tile, block), (tile, tile)),
    }[scaling]
    assert seen == [
        (e4m3, e4m3, *first, torch.bfloat16),
        (above, e4m3, *second, torch.bfloat16),
        (above, e4m3, *third, torch.bfloat16),
    ]


def test_meta_device_detects_wrong_layout():
    """Check that torch refuses wrong layouts on the `meta` device, so that the test above can fail."""
    values = torch.empty(16, 16, dtype=torch.float8_e4m3fn, device="meta")
    scale, kind = torch.empty(1, 1, device="meta"), F.ScalingType.TensorWise
    with pytest.raises(RuntimeError, match="col_major"):
        F.scaled_mm(values, values, scale, kind, scale, kind, output_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="divisible by 16"):
        F.scaled_mm(values[:, :8].contiguous(), values[:, :8].contiguous().t(), scale, kind, scale, kind)


@pytest.mark.parametrize(
    ("scaling", "capability", "cuda", "why"),
    [
        ("tensor", (8, 9), "12.4", None),
        ("row", (9, 0), "12.4", None),
        ("row", (10, 0), "13.0", None),
        ("block", (9, 0), "12.9", None),
        ("block", (9, 0), "13.0", None),
        ("tensor", (8, 0), "12.9", "8.9"),
        ("row", (7, 5), "12.9", "7.5"),
        ("block", (8, 6), "12.9", "8.9"),
        ("block", (8, 9), "12.9", "Hopper"),
        ("block", (10, 0), "12.9", "Hopper"),
        ("block", (9, 0), "12.8", "CUDA 12.9"),
        ("tensor", (9, 4), None, "NVIDIA"),
    ],
)
def test_each_fp8_scaling_requires_supported_gpu_and_cuda(scaling, capability, cuda, why):
    found = device.find_scaling_problem(scaling, capability, cuda)
    assert (found is None) == (why is None)
    if found:
        assert why in found[0]
        assert found[1].startswith("precision")


def pretend(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", "12.9")


def test_unsupported_gpu_is_refused_with_a_fix(monkeypatch):
    pretend(monkeypatch, (8, 0))
    with pytest.raises(UserError) as caught:
        build(Fp8(scaling="row"), build_small_run("precision=fp8"))
    assert str(caught.value) == (
        "precision=fp8 precision.scaling=row is not supported on the GPU NVIDIA A100.\n"
        "  float8 matmuls need compute capability 8.9 (Ada) or 9.0 (Hopper), and this GPU has 8.0.\n"
        "  precision=bf16"
    )
    build(Fp8(), build_small_run("precision=fp8", "run.device=cpu"))
    pretend(monkeypatch, (9, 0))
    build(Fp8(scaling="block"), build_small_run("precision=fp8"))


def test_unknown_scaling_is_refused():
    with pytest.raises(UserError, match="tensor or row or block"):
        build_small_run("precision=fp8", "precision.scaling=column")
