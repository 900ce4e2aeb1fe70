"""FLOPs per token, compared with a count by hand and with torch's counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from gangline.model.flops import count_flops_per_token, count_parameters
from gangline.model.init import make_whole_model
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.plan import plan_decoder
from gangline_basics.model.presets import PRESETS


def test_flops_per_token_match_hand_count():
    config = DecoderConfig(vocab_size=100, dim=16, layers=3, heads=4, kv_heads=2, head_dim=8, ffn_dim=40, qk_norm=True)
    tree, plan = plan_decoder(config)
    block = 16 * (32 + 16 + 16) + 32 * 16 + 3 * 16 * 40
    matrices = 3 * block + 100 * 16  # with the head; the embedding is a lookup
    assert count_flops_per_token(tree, 64, plan) == 6 * matrices + 12 * 3 * 4 * 8 * 64
    assert count_parameters(tree) == matrices + 100 * 16 + 3 * (2 * 16 + 2 * 8) + 16


def test_tied_head_counts_matmul_flops():
    both = [plan_decoder(DecoderConfig(vocab_size=100, layers=1, tied=tied)) for tied in (True, False)]
    assert count_flops_per_token(both[0][0], 32, both[0][1]) == count_flops_per_token(both[1][0], 32, both[1][1])
    tied, untied = (tree for tree, _ in both)
    assert count_parameters(untied) - count_parameters(tied) == 100 * 768


@pytest.mark.parametrize("frozen", [(), ("blocks.*.feed_forward", "head.weight")], ids=["all", "some frozen"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flops_match_torch_counter(kv_heads, frozen, random_batch):
    config = DecoderConfig(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=kv_heads, ffn_dim=48)
    tree, plan = plan_decoder(config)
    plan = replace(plan, frozen=frozen)
    model, batch = make_whole_model(tree, plan, seed=0), random_batch(2, 16, 64, documents=2)
    with FlopCounterMode(display=False) as counter:
        model(batch).backward()
    kernels = counter.get_flop_counts()["Global"]
    attention = sum(count for op, count in kernels.items() if "attention" in str(op))
    assert counter.get_total_flops() - attention == 2 * 16 * (count_flops_per_token(tree, 0, plan))


def test_llama_405b_flops_match_paper():
    """Compare with Llama 3 (arXiv 2407.21783, section 3.2): 3.8e25 FLOPs for 15.6e12 tokens in sequences of 8,192."""
    tree, plan = plan_decoder(PRESETS["llama3-405b"]())
    assert count_flops_per_token(tree, 8192, plan) * 15.6e12 == pytest.approx(3.8e25, rel=0.1)
