"""`moe=on` with `precision=fp8`: experts use float8 matmuls."""

from __future__ import annotations

import torch

from gangline.model.build import construct
from gangline.plan import Plan
from gangline.plugin.registry import build
from gangline_basics.model.decoder_nodes import FeedForwardNode
from gangline_basics.parallel.prepare import set_matmuls
from gangline_moe.config import MoeOptions
from gangline_moe.edit import make_layer_node
from gangline_moe.matmuls import PrecisionMatmuls
from gangline_testkit.runs import build_small_run


def layer():
    module = construct(make_layer_node(FeedForwardNode(dim=64, ffn_dim=64), MoeOptions(experts=4)))
    module = module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for name, array in module.state_dict().items():
        array.copy_(torch.randn(array.shape, generator=generator) * (0.25 if "share" in name else 0.15))
    return module


def test_experts_use_float8_matmuls():
    """Check that outputs and gradients differ from those of plain experts by 8-bit rounding, and by no more."""
    run = build_small_run("precision=fp8", "precision.scaling=row")
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1))
    found = {}
    for name in ("plain", "float8"):
        module = layer()
        if name == "float8":
            set_matmuls(module, Plan("e", "b", "h", 1, master_dtype=("router",)), build(run.precision, run))
            assert isinstance(module.experts.w_up.matmuls, PrecisionMatmuls)
        given = x.clone().requires_grad_()
        y = module(given)
        y.square().sum().backward()
        found[name] = [y.detach(), given.grad, *(p.grad for p in module.experts.parameters())]
    for got, want in zip(found["float8"], found["plain"], strict=True):
        apart = float((got - want).norm() / want.norm())
        assert 0.005 < apart < 0.15, apart
