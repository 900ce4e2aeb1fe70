"""Sync of ranks between steps: it uses host tensors, so that it does not wait for the device."""

from __future__ import annotations

import torch

from gangline.mesh import Mesh
from gangline.record import read_records
from gangline.train.rank import train
from gangline_parallel_megatron_style.explain.fake_comms import FakeComms
from gangline_testkit import rank
from gangline_testkit.sessions import open_session


def test_sync_between_steps_reads_nothing_from_the_device(tmp_path, monkeypatch):
    """Train on the meta device, whose tensors have no values: a sync that reads a device tensor raises.

    The model and the batches stay on the CPU, and the other rank is imitated by this one.
    """
    monkeypatch.setattr(rank, "make_comms", lambda mesh: FakeComms(Mesh.of({"dp_replicate": 2}), 0))
    monkeypatch.setattr(rank, "world", 2)
    words = ("parallel=ddp", "launch.processes=2", "run.steps=3", "run.sample=0", "validate.every=null")
    s = open_session(tmp_path / "out", *words, "checkpoint.every=null", "checkpoint.at_end=false")
    s.device = torch.device("meta")
    assert train(s) == 0
    records = read_records(tmp_path / "out" / "metrics.jsonl")
    assert [len(record["rank_losses"]) for record in records] == [2, 2, 2]
