"""Router gradients: exactly zero where the formula gives zero."""

from __future__ import annotations

import pytest
import torch

from gangline_moe.routers.base import divide_by_sum


@pytest.mark.parametrize("least", [0.0, 1e-20])
def test_single_expert_weight_has_zero_gradient(least):
    """Check that there is no rounding error of w / w, from which SOAP would compute its first basis."""
    weight = torch.rand(7, 1, dtype=torch.float64, requires_grad=True)
    divided = divide_by_sum(weight, least)
    divided.backward(torch.randn(7, 1, dtype=torch.float64))
    assert divided.eq(1).all()
    assert weight.grad.eq(0).all()


def test_weights_of_several_experts_add_up_to_one():
    weight = torch.rand(7, 3, dtype=torch.float64)
    torch.testing.assert_close(divide_by_sum(weight), weight / weight.sum(1, keepdim=True), rtol=0, atol=0)
