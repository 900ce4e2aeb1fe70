"""`moe.upcycle_from`: models with experts initialized from a trained dense model."""

from __future__ import annotations

import pytest
import torch

from gangline.config.check import check
from gangline.errors import UserError
from gangline.model.compose import compose_model
from gangline.model.init import list_shards, make_whole_model
from gangline.plugin import registry
from gangline.run.directory import RunDirectory
from gangline.shard import Shard
from gangline_basics.sampling.sampler import load_model
from gangline_moe.upcycle import upcycle
from gangline_testkit import RealRuns
from gangline_testkit.inputs import make_full_batch
from gangline_testkit.runs import build_small_run

MODEL = ("model.vocab_size=256", "model.dim=32", "model.heads=2", "model.kv_heads=1", "model.ffn_dim=64")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Train the runs `dense` and `sparse` in one directory, and return the directory."""
    with RealRuns(tmp_path_factory.mktemp("upcycle")) as runs:
        runs.train("run.dir=dense", "run.steps=4")
        runs.train("run.dir=sparse", "run.steps=4", "moe=on", "moe.router.bias_rate=0.1")
    return runs.directory


def run_of(here, *settings):
    return build_small_run(
        *MODEL, "model.qk_norm=false", "model.tied=true", "moe=on", f"moe.upcycle_from={here / 'dense'}", *settings
    )


def dense_model(here):
    run = RunDirectory.open(here / "dense").run()
    kept = registry.build(run.checkpoint, run, None)
    return load_model(run, kept, kept.find_latest(), "cpu")


@pytest.mark.parametrize("settings", [(), ("moe.top_k=4", "moe.experts=16"), ("moe.every=2",)])
def test_upcycled_model_matches_dense_logits(here, settings):
    """Check copies of one feed-forward whose weights add up to 1: their sum equals the feed-forward."""
    run = run_of(here, *settings)
    tree, plan = compose_model(run)
    model = make_whole_model(tree, plan, seed=0)
    drawn = model.blocks[0].feed_forward.router.gate.weight.clone()
    run.edits["moe"].fill_init_weights(run, list_shards(model, plan), plan)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    batch = make_full_batch(tokens)
    with torch.no_grad():
        torch.testing.assert_close(
            model.compute_logits(batch), dense_model(here).compute_logits(batch), rtol=1e-5, atol=1e-5
        )
    assert torch.equal(model.blocks[0].feed_forward.router.gate.weight, drawn)


def test_rank_fills_its_shard_of_experts(here):
    whole = dense_model(here).blocks[1].feed_forward.w_down.weight
    part = torch.zeros(2, 5, 64)
    shard = Shard("model/blocks.1.feed_forward.experts.w_down.weight", (8, 32, 64), part.dtype, (4, 7, 0), part)
    upcycle(str(here / "dense"), [shard])
    assert torch.equal(part, whole[7:12].expand(2, 5, 64))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("moe.upcycle_from={}/sparse",), "run has experts already"),
        (("moe.ffn_dim=32",), "moe.ffn_dim=32 is not the feed-forward width"),
        (("moe.shared=1",), "moe.shared=1 cannot be combined with moe.upcycle_from"),
    ],
)
def test_incompatible_upcycle_options_are_refused(here, settings, message):
    with pytest.raises(UserError, match=message):
        check(run_of(here, *(setting.format(here) for setting in settings)))


def test_upcycle_from_different_model_is_refused(here):
    run = run_of(here, "model.layers=3")
    tree, plan = compose_model(run)
    with pytest.raises(UserError, match="the two models differ in more than their experts"):
        run.edits["moe"].fill_init_weights(run, list_shards(make_whole_model(tree, plan, seed=0), plan), plan)
