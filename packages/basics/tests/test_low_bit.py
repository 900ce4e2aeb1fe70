"""Quantization of frozen weights: plan rules and block sizes over blocks of different kinds."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from gangline.config.defaults import build_default_run
from gangline.model.compose import compose_model
from gangline.model.init import make_whole_model
from gangline.model.linear_nodes import LinearNode
from gangline.model.tree import get_parameter_shapes, map_paths, replace_node
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.low_bit import EightBitLinear
from gangline_basics.model.low_bit_node import keep_in_8_bits, keep_in_bf16

MODEL = DecoderConfig(vocab_size=64, dim=64, layers=3, heads=2, ffn_dim=128)


def unlike(hidden: int):
    """Return (tree, plan) with all weights frozen, and with width `hidden` of the feed-forward of block 1."""
    tree, plan = compose_model(build_default_run(model=MODEL))
    path = "blocks.1.feed_forward"
    node = map_paths(tree)[path]
    plain = {item.name: getattr(node, item.name) for item in fields(node)}
    plain = {name: LinearNode(bias=it.bias) if isinstance(it, LinearNode) else it for name, it in plain.items()}
    tree = replace_node(tree, path, type(node)(**plain | {"ffn_dim": hidden}))
    return tree, plan.extend(frozen=("*",))


@pytest.mark.parametrize(("hidden", "block"), [(48, 16), (24, 0)])
def test_quantization_block_size_is_chosen_per_matrix(hidden, block):
    """Check also a matrix with 24 columns, which no block size divides, so the matrix is kept in bfloat16."""
    tree, plan = unlike(hidden)
    wanted = dict(make_whole_model(tree, plan, seed=1).named_parameters())
    tree, plan, paths = keep_in_8_bits(tree, plan)
    name = "blocks.{}.feed_forward.w_down.weight"
    assert [plan.find_low_bit(name.format(number)).block for number in range(3)] == [64, block, 64]
    assert ("blocks.1.feed_forward.w_down" in paths) == bool(block)
    assert plan.get_dtype(name.format(1)) == ("int8" if block else "bfloat16")
    model = make_whole_model(tree, plan, seed=1)
    coded = {path: module for path, module in model.named_modules() if isinstance(module, EightBitLinear)}
    assert set(coded) == set(paths)
    for path, module in coded.items():
        weight = wanted[f"{path}.weight"]
        worst = (module.matrix.dequantise() - weight).abs().max() / weight.abs().max()
        assert float(worst) <= 0.5001 / 127, path
    for made, weight in model.state_dict().items():
        if made in wanted and made.rpartition(".")[0] not in coded:
            near = wanted[made].bfloat16().float() if weight.dim() > 1 else wanted[made]
            torch.testing.assert_close(weight.float(), near, rtol=0, atol=0)


def test_trained_weights_keep_full_precision():
    """Check that a plan rule for all blocks does not round weights that the optimizer updates."""
    tree, plan = compose_model(build_default_run(model=MODEL))
    plan = plan.extend(frozen=("*",), trained=("blocks.1.feed_forward",))
    for kept in (keep_in_bf16(tree, plan), keep_in_8_bits(tree, plan)[1]):
        for name in get_parameter_shapes(tree):
            if not plan.is_frozen(name):
                assert kept.get_dtype(name) is None, name
