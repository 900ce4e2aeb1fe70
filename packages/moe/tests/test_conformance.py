"""Core's suite for model edits: one process, data ranks, and ranks of `ep`."""

from __future__ import annotations

from gangline.testing import ModelEditSuite


class TestOn(ModelEditSuite):
    choice = "moe=on"
    can = {"law"}


class TestExpertParallel(ModelEditSuite):
    """Four experts on two ranks of each fold, every balancing term on, a shared expert, a dense block left."""

    choice = "moe=on"
    settings = (
        "moe.ep=2",
        "moe.experts=4",
        "moe.shared=1",
        "moe.first=1",
        "moe.router.sequence_loss=0.01",
        "moe.router.z_loss=0.001",
        "moe.router.bias_rate=0.01",
        "moe.router.jitter=0.1",
    )
    layouts = (2, 4)
    can = {"law"}
