"""`run.loss_chunk` over a sharded vocabulary: loss and gradients of the unchunked loss on every rank."""

from __future__ import annotations

import pytest
import write_ranks

from gangline_testkit.compare import assert_number_close, close
from gangline_testkit.pool import get_pool
from gangline_testkit.runs import build_small_run

SETTINGS = (
    "model.vocab_size=51",
    "model.layers=2",
    "batch.sequence_length=16",
    "batch.global_size=8",
    "precision=fp64",
)


@pytest.mark.parametrize("on", ["tp=2", "tp=2 sequence_parallel=false", "tp=2 zero=3 dp_shard=2"])
@pytest.mark.parametrize("more", [(), ("model.z_loss=0.1", "model.tied=false")], ids=["plain", "z"])
def test_chunked_loss_matches_unchunked_loss(on, more):
    world = 4 if "dp_shard" in on else 2
    words = (*SETTINGS, *more, "parallel=3d", *(f"parallel.{word}" for word in on.split()))
    whole, parts = (
        get_pool(world).run(write_ranks.stepped, build_small_run(*words, *chunk))
        for chunk in ((), ("run.loss_chunk=3",))
    )
    for one, other in zip(whole, parts, strict=True):
        assert_number_close("loss", other.loss_sum, one.loss_sum, 1e-12)
        assert_number_close("norm", other.norm, one.norm, 1e-12)
        assert other.metrics == pytest.approx(one.metrics, rel=1e-12)
        for (name, _, before), (_, _, after) in zip(one.held, other.held, strict=True):
            close(name, after, before, 1e-12)
