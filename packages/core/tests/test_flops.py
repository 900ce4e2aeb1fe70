"""What a token costs, counted by hand and by torch."""

from __future__ import annotations

import pytest
from torch.utils.flop_counter import FlopCounterMode

from gangline.model.flops import flops_per_token, parameter_count
from gangline.model.init import whole_model
from gangline.model.plan import decoder
from gangline.model.shapes import DecoderConfig, Llama3_405B


def test_is_six_for_each_weight_and_twelve_for_each_key():
    config = DecoderConfig(vocab_size=100, dim=16, layers=3, heads=4, kv_heads=2, head_dim=8, hidden=40, qk_norm=True)
    tree, _ = decoder(config)
    block = 16 * (32 + 16 + 16) + 32 * 16 + 3 * 16 * 40
    matrices = 3 * block + 100 * 16  # the head; the embedding is looked up
    assert flops_per_token(tree, 64) == 6 * matrices + 12 * 3 * 4 * 8 * 64
    assert parameter_count(tree) == matrices + 100 * 16 + 3 * (2 * 16 + 2 * 8) + 16


def test_a_tied_head_is_multiplied_all_the_same():
    tied, untied = (decoder(DecoderConfig(vocab_size=100, layers=1, tied=tied))[0] for tied in (True, False))
    assert flops_per_token(tied, 32) == flops_per_token(untied, 32)
    assert parameter_count(untied) - parameter_count(tied) == 100 * 768


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_torch_counts_the_same(kv_heads, random_batch):
    config = DecoderConfig(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=kv_heads, hidden=48)
    tree, plan = decoder(config)
    model, batch = whole_model(tree, plan, seed=0), random_batch(2, 16, 64, documents=2)
    with FlopCounterMode(display=False) as counter:
        model(batch).backward()
    kernels = counter.get_flop_counts()["Global"]
    attention = sum(count for op, count in kernels.items() if "attention" in str(op))
    assert counter.get_total_flops() - attention == 2 * 16 * (flops_per_token(tree, 0))


def test_405b_costs_what_its_paper_says():
    """Llama 3 (arXiv 2407.21783, section 3.2): 3.8e25 operations for 15.6e12 tokens at 8,192 a sequence."""
    tree, _ = decoder(Llama3_405B())
    assert flops_per_token(tree, 8192) * 15.6e12 == pytest.approx(3.8e25, rel=0.1)
