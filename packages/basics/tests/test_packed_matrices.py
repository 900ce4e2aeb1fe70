"""Packed and column-major weight matrices for generation: values, names and generated tokens are unchanged."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gangline.config.defaults import build_default_run
from gangline.model.compose import compose_model
from gangline.model.init import make_whole_model
from gangline.runtime import Sampling
from gangline_basics.model import packed as packing
from gangline_basics.model.columns import lay_out_by_columns
from gangline_basics.model.config import Tiny
from gangline_basics.model.packed import is_available, pack_weights
from gangline_basics.sampling.sampler import WORTH_PACKING, generate

SHAPE = {"dim": 24, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn_dim": 40, "init_std": 0.5}


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    monkeypatch.setattr(packing, "LEAST_BYTES", 1)


def model_of(dtype: torch.dtype = torch.float32, **options):
    tree, plan = compose_model(build_default_run(model=Tiny(**(SHAPE | options))))
    return make_whole_model(tree, plan, seed=3, dtype=dtype)


def prompts(*lengths: int) -> list[list[int]]:
    return [torch.randint(256, (length,)).tolist() for length in lengths]


@pytest.mark.parametrize("options", [{}, {"tied": False}, {"soft_cap": 1.5}], ids=str)
def test_packed_weights_generate_same_tokens(options):
    model, other = model_of(**options), model_of(**options)
    lay_out_by_columns(other)
    asked, how = prompts(5, 9, 2), Sampling(tokens=WORTH_PACKING)
    plain = [generate(model, [prompt], how, cached=True)[0] for prompt in asked]
    assert generate(model, asked, how, cached=True) == plain
    assert generate(other, asked, how, cached=True) == plain
    assert [generate(other, [prompt], how, cached=True)[0] for prompt in asked] == plain


def test_column_major_layout_changes_no_weights():
    model, other = model_of(tied=False), model_of(tied=False)
    lay_out_by_columns(other)
    assert not other.head.weight.is_contiguous()
    assert other.blocks[0].feed_forward.w_down.weight.is_contiguous()
    assert other.embed.weight.is_contiguous()
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


def test_float32_matmuls_are_packed_inside_context_only():
    model, wide = model_of(), model_of(torch.float64)
    x = torch.randn(3, 2, 24)
    linear, head = model.blocks[0].attention.wq, model.head
    plain, logits = linear(x), head.compute_logits(x)
    with pack_weights(model, 3), pack_weights(wide, 3):
        assert (linear.matmul is not F.linear) == is_available()
        assert wide.blocks[0].attention.wq.matmul is F.linear
        torch.testing.assert_close(linear(x), plain)
        torch.testing.assert_close(head.compute_logits(x), logits)
    assert linear.matmul is F.linear
    assert torch.equal(head.compute_logits(x), logits)


def test_small_weights_are_not_packed(monkeypatch):
    model = model_of()
    monkeypatch.setattr(packing, "LEAST_BYTES", model.head.weight.nbytes)
    with pack_weights(model, 3):
        assert model.blocks[0].attention.wq.matmul is F.linear
        assert (model.head.matmul is not F.linear) == is_available()
