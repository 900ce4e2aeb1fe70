"""`explain` of model families: parameters, activation bytes and transfers, compared with the modules."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import prod

import pytest
import torch
from test_families import FAMILIES, SIZES
from torch import nn

from gangline.config import Run
from gangline.config.compose import compose_one
from gangline.config.serial import from_dict
from gangline.mesh import Mesh
from gangline.model.build import construct
from gangline.model.flops import count_parameters
from gangline.model.tree import Node, get_parameter_shapes, iterate_nodes, replace_node
from gangline_basics.explain.activations import count_angles
from gangline_basics.model.decoder_nodes import AttentionNode
from gangline_models.delta_nodes import GatedAttentionNode
from gangline_parallel_megatron_style.cost import activations, traffic
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.explain.of_run import make_case
from gangline_parallel_megatron_style.explain.trace import trace
from gangline_testkit import count_saved_bytes
from gangline_testkit.inputs import make_full_batch
from gangline_testkit.runs import SMALL, parse_settings

B, T = 2, 16
# The closed form counts the fused kernels of a GPU. A CPU keeps masks for windows and scores for soft caps, so the
# families run without them.
FUSED = {
    "phi3": ("model.window=null",),
    "gemma2": ("model.soft_cap=null",),
    "gpt_oss": ("model.window=null", "model.full_every=null"),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run_of(family: str, precision: str) -> Run:
    plain = [word for word in SMALL if not word.startswith(("model=", "model.kv_heads", "model.qk_norm"))]
    batch = (f"batch.micro_size={B}", "parallel=tp", f"precision={precision}")
    own = [word for word in FAMILIES[family] if not word.startswith("moe")]  # test_moe_explain.py covers experts
    return from_dict(parse_settings([*plain, f"model={family}", *SIZES, *own, *FUSED.get(family, ()), *batch]))


def built(case: Case, precision: str) -> nn.Module:
    model = construct(case.tree).to(DTYPES[precision]).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_counted_parameters_match_modules(family):
    case = Case.of(run_of(family, "fp32"), Mesh.of({}))
    model = construct(case.tree)
    assert get_parameter_shapes(case.tree) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert count_parameters(case.tree) == sum(prod(p.shape) for p in model.parameters())


def without_sinks(case: Case) -> Case:
    """Return the case without attention sinks, for which a CPU keeps scores."""
    for path, node in iterate_nodes(case.tree):
        if isinstance(node, AttentionNode) and node.sinks:
            case = replace(case, tree=replace_node(case.tree, path, replace(node, sinks=None)))
    return case


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_kept_activations_match_closed_form(family, precision):
    case = without_sinks(Case.of(run_of(family, precision), Mesh.of({})))
    model = built(case, precision)
    batch = make_full_batch(torch.arange(B * T).view(B, T) % 61)
    for index in (0, 1) if family == "qwen3_next" else (1,):  # the first block of other families may have a window
        hidden = model.embed(batch).detach().requires_grad_()
        sizes = activations.make_activation_sizes(case, gpu=False)
        found = count_saved_bytes([*model.parameters(), batch.position], lambda: model.blocks[index](hidden, batch))  # noqa: B023
        told = activations.count_block(case, index, sizes) + count_angles([case.blocks[index]], sizes)
        assert found - beyond_a_gpu(family, precision, case.blocks[index].attention) == told


def beyond_a_gpu(family: str, precision: str, node: Node) -> int:
    """Return the bytes that a CPU keeps of a block minus those of the closed form, which describes a GPU."""
    bf16 = precision == "bf16"
    if family == "gpt2" and bf16:  # each LayerNorm keeps mean and deviation in bfloat16, not in float32
        return -2 * 2 * B * T * 2
    if family == "deepseek_v3" and bf16:  # a float32 copy of the latent vector, without the key stored next to it
        return -B * T * node.rope_dim * 2
    if not isinstance(node, GatedAttentionNode):
        return 0
    heads, key_heads, each = node.heads, node.kv_heads, B * T * node.head_dim
    if bf16:  # norms of heads keep two float32 copies instead of their input and the gate stored next to it
        return each * (8 * (heads + key_heads) - 2 * (2 * heads + key_heads))
    return each * 4 * (heads + key_heads)


LATENT = (
    "model=deepseek_v3 model.layers=2 model.dim=64 model.heads=4 model.ffn_dim=96 model.vocab_size=128 model.q_rank=32 "
    "model.kv_rank=24 model.nope_dim=16 model.rope_dim=8 model.v_dim=16 run.device=cuda batch.global_size=4 "
    "batch.micro_size=1 batch.sequence_length=16 parallel=tp launch.processes=2"
)


@pytest.mark.parametrize("words", ["", "parallel.sequence_parallel=false", "precision=bf16 run.recompute=full"])
def test_latent_attention_transfers_match_trace(words):
    """Compare exact bytes along tp: the key of latent attention is all-gathered, its gradient is summed."""
    case = make_case(run := compose_one([*LATENT.split(), *words.split()]))
    sent = trace(run, case, 0).sent
    rings = {"all_gather": 1, "all_reduce": 1, "reduce_scatter": Fraction(1, 2)}
    found = sum(int(nbytes * rings[operation]) for (_, operation), nbytes in sent.items())
    assert sum(each.bytes for each in traffic.list_sent(case, 0)) == found
