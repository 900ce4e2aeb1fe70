"""Invalid options of `moe=on`: one message before any process starts."""

from __future__ import annotations

import pytest

from gangline.config.check import check
from gangline.config.compose import compose_one
from gangline.errors import UserError
from gangline.model.compose import compose_model
from gangline.plan import Plan
from gangline_basics.model.decoder_nodes import NormNode
from gangline_moe.config import MoeOptions
from gangline_moe.edit import edit
from gangline_testkit.runs import build_small_run

CASES = {
    "moe.experts=0": "moe.experts=0 must be at least 1",
    "moe.top_k=9": "moe.top_k=9 is more than moe.experts=8",
    "moe.capacity_factor=0": "moe.capacity_factor=0.0 must be more than 0",
    "moe.capacity_factor=-1": "moe.capacity_factor=-1.0 must be more than 0",
    "moe.capacity_factor=.nan": "moe.capacity_factor=nan must be finite",
    "moe.ep=3": "moe.ep=3 does not divide moe.experts=8",
    "moe.ep=0": "moe.ep=0 must be at least 1",
    "moe.ep=2": "moe.ep=2 is not possible: parallel=single does not shard the experts",
    "moe.ep_axes=[pp]": "expected dp_replicate or dp_shard or cp or tp, got 'pp'",
    "moe.ep_axes=[dp]": "expected dp_replicate or dp_shard or cp or tp, got 'dp'",
    "moe.ep_axes=[]": "moe.ep_axes=[] must name at least one mesh axis",
    "moe.first=2": "moe.first=2 leaves no block with experts",
    "moe.every=0": "moe.every=0 must be at least 1",
    "moe.ffn_dim=0": "moe.ffn_dim=0 must be at least 1",
    "moe.router.jitter=1": "moe.router.jitter=1.0 must be at least 0 and less than 1",
    "moe.router.z_loss=-1": "moe.router.z_loss=-1.0 must be at least 0",
    "moe.ranks_per_node=0": "moe.ranks_per_node=0 must be at least 1",
    "moe.upcycle_from=nowhere": "moe.upcycle_from=nowhere",
}


@pytest.mark.parametrize("setting", CASES)
def test_invalid_moe_options_are_refused(setting):
    with pytest.raises(UserError) as refused:
        check(build_small_run("moe=on", "model.vocab_size=256", setting))
    assert CASES[setting] in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("moe/router=grouped", "moe.router.groups=3"), "does not divide moe.experts=8"),
        (("moe/router=grouped", "moe.router.groups=8"), "into groups of two or more"),
        (
            ("moe/router=grouped", "moe.router.groups=4", "moe.router.top_groups=5"),
            "moe.router.top_groups=5 must be from 1 to 4",
        ),
        (
            ("moe/router=grouped", "moe.router.groups=4", "moe.router.top_groups=1", "moe.top_k=3"),
            "moe.router.top_groups=1 must be from 2 to 4",
        ),
        (("moe/router=expert_choice", "moe.router.global_aux_loss=0.1"), "has no effect with expert choice"),
    ],
)
def test_invalid_router_options_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        check(build_small_run("moe=on", *settings))


def test_ep_is_refused_under_ddp():
    """Check a strategy that has data ranks and does not support folds."""
    words = ("moe=on", "model.vocab_size=256", "parallel=ddp", "launch.processes=2", "moe.ep_axes=[dp_replicate]")
    with pytest.raises(UserError, match=r"moe.ep=2 is not possible: parallel=ddp does not shard the experts"):
        check(build_small_run(*words, "moe.ep=2"))
    run = build_small_run(*words)
    check(run)
    assert run.edits["moe"].resolve(run).ep == 1


def test_model_without_feed_forwards_is_refused():
    plan = Plan(embed="embed", blocks="blocks", head="head", layers=1)
    with pytest.raises(UserError, match="moe found no gated feed-forward layer to replace in this model"):
        edit(NormNode(dim=4), plan, MoeOptions())


def test_unset_ep_defaults_to_largest_possible_size():
    """Check that `ep` is as large as the numbers of experts and data ranks allow."""
    from gangline_testkit.toys.plugin import Rows

    def ep(run):
        return compose_model(run)[1].folds[0].size

    run = build_small_run("moe=on", "launch.processes=6")
    run.parallel = Rows()
    assert ep(run) == 2
    assert ep(build_small_run("moe=on")) == 1
    run.edits["moe"].ep = 1
    assert ep(run) == 1


@pytest.mark.parametrize(
    ("word", "name"),
    [("moe.hidden=8", "moe.ffn_dim"), ("model.hidden=8", "model.ffn_dim"), ("moe.ep_out_of=[]", "moe.ep_axes")],
)
def test_renamed_option_error_suggests_new_name(word, name):
    with pytest.raises(UserError, match=rf"Did you mean {name}\?"):
        compose_one(["moe=on", word])
