"""Checkpoint arrays without a place in the resumed run: `may_drop` of an optimizer or a callback decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gangline.errors import UserError
from gangline.optimizer import Optimizer
from gangline_basics.callback.ema import EmaCallback
from gangline_basics.checkpoint.torch_dcp import DcpCheckpointer
from gangline_basics.optimizer.adamw import AdamwOptimizer
from gangline_testkit.sessions import open_session, train_session

OLD = "optimizer/old/head.weight"


@pytest.fixture
def run_dir(tmp_path):
    """Return the directory of a run with a checkpoint at step 2 that contains two weight averages."""
    assert train_session(tmp_path / "out", "callback=ema", "callback.ema.decays=[0.5,0.9]", "run.steps=2") == 0
    return tmp_path / "out"


@pytest.fixture
def with_old(run_dir, monkeypatch):
    """Return the same run, whose checkpoint also lists an array that the optimizer does not have."""
    arrays, load = DcpCheckpointer.read_shapes, DcpCheckpointer.load
    monkeypatch.setattr(DcpCheckpointer, "read_shapes", lambda self, id: {**arrays(self, id), OLD: (4,)})

    def load_known(self, id, shards, registry):
        load(self, id, [shard for shard in shards if shard.name != OLD], registry)

    monkeypatch.setattr(DcpCheckpointer, "load", load_known)
    return run_dir


def resumed(run_dir, decays="[0.5,0.9]"):
    return open_session(run_dir, "callback=ema", f"callback.ema.decays={decays}", "run.steps=4")


def test_leftover_optimizer_array_is_refused_by_name(with_old):
    with pytest.raises(UserError, match="state that this run does not have") as caught:
        resumed(with_old)
    assert OLD in str(caught.value)


def test_dropped_optimizer_array_is_noted(with_old, monkeypatch):
    asked = []
    monkeypatch.setattr(Optimizer, "may_drop", lambda self, names: asked.append(names) or names)
    assert any("optimizer arrays that this run does not use" in note for note in resumed(with_old).notes)
    assert asked == [[OLD]], "the optimizer is asked once, about arrays without a place alone"


def test_filled_optimizer_array_is_not_leftover(with_old, monkeypatch):
    filled = AdamwOptimizer.select_filled

    def select_filled(self, state):
        shards = list(filled(self, state))
        return [*shards, replace(shards[0], name=OLD)]

    monkeypatch.setattr(AdamwOptimizer, "select_filled", select_filled)
    assert resumed(with_old).step == 2


def test_leftover_callback_arrays_are_dropped_by_default(run_dir):
    s = resumed(run_dir, "[0.9]")
    assert s.step == 2
    assert any("arrays of callback=ema that this run does not use: ignored" in note for note in s.notes)


def test_required_leftover_callback_array_is_refused(run_dir, monkeypatch):
    monkeypatch.setattr(EmaCallback, "may_drop", lambda self, names: ())
    with pytest.raises(UserError, match="state that this run does not have") as caught:
        resumed(run_dir, "[0.9]")
    assert "callback/ema/0.5/" in str(caught.value)
