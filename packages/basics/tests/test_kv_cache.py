"""KV cache: cached generation equals uncached generation, and modules without a cache are recomputed."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import pytest
import torch

from gangline.config.defaults import build_default_run
from gangline.model.calls import AttentionCall
from gangline.model.compose import compose_model
from gangline.model.init import make_whole_model
from gangline.model.tree import iterate_nodes, replace_node
from gangline.runtime import Sampling
from gangline_basics.model.config import Tiny
from gangline_basics.model.decoder_nodes import AttentionNode, FeedForwardNode
from gangline_basics.model.kept_tokens import KeyValues
from gangline_basics.model.seams import list_recomputed
from gangline_basics.sampling.sampler import generate

SHAPE = {"dim": 24, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn_dim": 40, "init_std": 0.5}


def model_of(dtype: torch.dtype = torch.float64, **options):
    run = build_default_run(model=Tiny(**(SHAPE | options)))
    tree, plan = compose_model(run)
    return tree, make_whole_model(tree, plan, seed=3, dtype=dtype)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]


OPTIONS = [
    {},
    {"kv_heads": 4, "qk_norm": True},
    {"kv_heads": 1, "attention_scale": 0.7},
    {"window": 1},
    {"window": 5},
    {"window": 5, "full_every": 2, "sinks": True},
    {"window": 30, "soft_cap": 1.5},
    {"soft_cap": 0.7, "sinks": True},
]
APART = (1, 13, 4)  # different prompt lengths: one token, and more tokens than a window


# By default, options run only with prompts of different lengths; one prompt and equal lengths run without options.
@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        pytest.param(options, lengths, marks=pytest.mark.nightly if options and lengths != APART else ())
        for lengths in ((7,), (6, 6, 6), APART)
        for options in OPTIONS
    ],
    ids=str,
)
def test_cached_generation_matches_uncached_generation(options, lengths):
    tree, model = model_of(**options)
    assert list_recomputed(tree) == []
    for how in (Sampling(tokens=33), Sampling(tokens=33, temperature=1.0, seed=2)):
        kept = generate(model, prompts(*lengths), how, cached=True)
        assert kept == generate(model, prompts(*lengths), how, cached=False)
        assert len({tuple(one.tokens) for one in kept}) == len(lengths), "the test tells rows apart"


def test_bfloat16_model_generates_with_cache():
    _, model = model_of(torch.bfloat16, window=5, sinks=True)
    (one,) = generate(model, prompts(7), Sampling(tokens=9), cached=True)
    assert len(one.tokens) == 9


@dataclass(frozen=True, kw_only=True)
class SilentNode(FeedForwardNode):
    module: ClassVar[str] = "gangline_basics.model.feed_forward:FeedForward"


@dataclass(frozen=True, kw_only=True)
class OwnAttentionNode(AttentionNode):
    module: ClassVar[str] = "gangline_basics.model.attention:Attention"


def test_modules_without_kv_cache_are_listed():
    tree, _ = model_of()
    for path, kind in (("blocks.1.feed_forward", SilentNode), ("blocks.2.attention", OwnAttentionNode)):
        node = dict(iterate_nodes(tree))[path]
        silent = replace_node(tree, path, kind(**{item.name: getattr(node, item.name) for item in fields(node)}))
        assert list_recomputed(silent) == [f"{path} ({kind.__name__})"]
    everything = replace_node(
        tree, "blocks.0.attention", replace(dict(iterate_nodes(tree))["blocks.0.attention"], causal=False)
    )
    assert list_recomputed(everything) == ["blocks.0.attention (AttentionNode)"]


def test_kv_cache_refuses_multi_token_decode_and_overflow():
    kept = KeyValues(lambda q, k, v, document, position: v, AttentionCall(), 3)
    x = torch.ones(1, 1, 2, 4)
    position = torch.arange(2)[None]
    kept.attend(x, x, x, None, position)
    with pytest.raises(ValueError, match="2 tokens cannot be added to the KV cache at once"):
        kept.attend(x, x, x, None, position)
    one = x[:, :, :1]
    kept.attend(one, one, one, None, position[:, :1])
    with pytest.raises(ValueError, match="the KV cache is full: it has room for 3 tokens"):
        kept.attend(one, one, one, None, position[:, :1])
