"""Conformance suite of the testkit for model edits: `moe=on` on one process, data ranks and `moe.ep` ranks."""

from __future__ import annotations

from gangline_testkit import ModelEditSuite, PartSuite


class TestOn(ModelEditSuite):
    choice = "moe=on"
    can = {"layout"}


class TestExpertParallel(ModelEditSuite):
    """Four experts on two ranks of each fold, with every balancing loss, a shared expert and one dense block."""

    choice = "moe=on"
    settings = (
        "moe.ep=2",
        "moe.experts=4",
        "moe.shared=1",
        "moe.first=1",
        "moe.router.seq_aux_loss=0.01",
        "moe.router.z_loss=0.001",
        "moe.router.bias_rate=0.01",
        "moe.router.jitter=0.1",
    )
    layouts = (2, 4)
    can = {"layout"}


class Published(ModelEditSuite):
    """Published shape with few, narrow experts, in one process."""

    settings = ("moe.experts=8", "moe.top_k=2", "moe.ffn_dim=16")
    layouts = (1,)
    can = {"layout"}


class TestMixtral(Published):
    choice = "moe=mixtral_8x7b"


class TestQwen3(Published):
    choice = "moe=qwen3_30b_a3b"


class TestDeepSeekV3(Published):
    choice = "moe=deepseek_v3"
    settings = (*Published.settings, "moe.first=1", "moe.router.groups=4", "moe.router.top_groups=2")


class TestSoftmax(PartSuite):
    choice = "moe/router=softmax"


class TestSigmoid(PartSuite):
    choice = "moe/router=sigmoid"


class TestGrouped(PartSuite):
    choice = "moe/router=grouped"


class TestExpertChoice(PartSuite):
    choice = "moe/router=expert_choice"
