"""Published shapes with experts: published parameter counts, and FLOPs of active experts."""

from __future__ import annotations

import pytest

from gangline.model.compose import compose_model
from gangline.model.flops import count_flops_per_token, count_parameters
from gangline.model.tree import get_parameter_shapes, iterate_nodes
from gangline.plan import Plan
from gangline_moe.nodes import ExpertsNode, MoeNode, RouterNode
from gangline_testkit.runs import build_small_run

MIXTRAL = "dim=4096 layers=32 heads=32 kv_heads=8 head_dim=128 ffn_dim=14336 vocab_size=32000 qk_norm=false"
QWEN = "dim=2048 layers=48 heads=32 kv_heads=4 head_dim=128 ffn_dim=6144 vocab_size=151936 qk_norm=true"
DEEPSEEK = "dim=7168 layers=61 heads=128 kv_heads=128 head_dim=128 ffn_dim=18432 vocab_size=129280 qk_norm=false"


def tree_of(model, *settings):
    return compose_model(build_small_run(*(f"model.{word}" for word in model.split()), *settings))[0]


@pytest.mark.parametrize(
    ("model", "choice", "parameters"),
    [(MIXTRAL, "mixtral_8x7b", 46_702_792_704), (QWEN, "qwen3_30b_a3b", 30_532_122_624)],
)
def test_preset_parameter_count_matches_published(model, choice, parameters):
    assert count_parameters(tree_of(model, f"moe={choice}")) == parameters


def test_deepseek_v3_expert_parameters_match_formula():
    """Compare with 58 sparse blocks (61 less 3 dense): 256 experts, 1 shared expert of width 2048, and a gate."""
    tree = tree_of(DEEPSEEK, "moe=deepseek_v3", "moe/router=grouped")
    ours = sum(
        value[0] * value[1] * (value[2] if len(value) > 2 else 1)
        for name, value in get_parameter_shapes(tree).items()
        if any(part in name for part in (".experts.", ".shared.", ".router."))
    )
    assert ours == 58 * (257 * 3 * 7168 * 2048 + 256 * 7168)


def test_flops_count_only_active_experts_and_router():
    dense, sparse = tree_of(MIXTRAL), tree_of(MIXTRAL, "moe=mixtral_8x7b")
    trained = Plan(embed="embed", blocks="blocks", head="head", layers=32)
    extra = 3 * 32 * (2 * 3 * 4096 * 14336 + 2 * 8 * 4096)  # one expert more than the dense layer, and the gate
    assert count_flops_per_token(sparse, 64, trained) - count_flops_per_token(dense, 64, trained) == extra


def test_moe_first_and_moe_every_select_blocks():
    tree = tree_of("layers=6", "moe=on", "moe.first=1", "moe.every=2")
    found = [path for path, node in iterate_nodes(tree) if isinstance(node, MoeNode)]
    assert found == [f"blocks.{index}.feed_forward" for index in (1, 3, 5)]
    assert sum(isinstance(node, RouterNode | ExpertsNode) for _, node in iterate_nodes(tree)) == 6
