"""`callback=ema` with `checkpoint=zarr`: resume with averaged weights, and sampling from them."""

from __future__ import annotations

import torch

from gangline_basics.sampling.sampler import sample
from gangline_testkit.sessions import open_session, train_on_ranks, train_session

EMA = ("callback=ema", "callback.ema.decays=[0.5,0.9]", "checkpoint=zarr", "run.deterministic=true")
ALIKE = ("batch.micro_size=1", "parallel.groups=2")  # same order of additions as on two data ranks


def test_resume_restores_ema_weights_bitwise(tmp_path):
    train_session(tmp_path / "straight", *EMA, *ALIKE, "run.steps=4")
    train_on_ranks(2, tmp_path / "out", *EMA, "batch.micro_size=1", "parallel=ddp", "run.steps=2")
    train_session(tmp_path / "out", *EMA, *ALIKE, "run.steps=4")
    one, two = (
        {
            shard.name: shard.local
            for shard in open_session(tmp_path / name, *EMA).shards()
            if "callback/ema" in shard.name
        }
        for name in ("straight", "out")
    )
    assert one.keys() == two.keys()
    assert one
    assert not [name for name in one if not torch.equal(one[name], two[name])]
    assert sample(tmp_path / "out", "the", 4, weights="callback/ema/0.9").startswith("the")
