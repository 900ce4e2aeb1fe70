"""Conformance suite for strategies, run on tensor, pipeline, context and 3D parallelism.

One rank is the same for every strategy and is tested in `test_conformance_data`. The layouts here cover each kind of
sharding of each axis once; more ranks are in `test_conformance_nightly` and in `test_layouts_compositions`.
"""

from __future__ import annotations

from gangline_testkit import StrategySuite
from gangline_testkit.scenarios import RunLayout

FEW = ("batch.global_size=4",)  # no axis of these layouts splits the batch, and each sample adds communication
LONG = ("model.layers=4", "batch.global_size=8", "batch.micro_size=1")


class TestTp(StrategySuite):
    choice = "parallel=tp"
    settings = FEW
    layouts = (
        RunLayout(2, ("model.kv_heads=1",)),  # both ranks hold the key head
        RunLayout(2, ("parallel.sequence_parallel=false",)),
    )


class TestPp(StrategySuite):
    choice = "parallel=pp"
    settings = LONG
    can = {"exact"}
    layouts = (
        RunLayout(4, ("parallel.schedule=zb_h1",)),
        RunLayout(2, ("parallel.schedule=dualpipe_v",)),
    )


class TestCp(StrategySuite):
    choice = "parallel=3d"
    settings = (*FEW, "parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1")
    layouts = (RunLayout(2, ("parallel.cp=2",)), RunLayout(2, ("parallel.cp=2", "parallel.context=ulysses")))


class Test3d(StrategySuite):
    choice = "parallel=3d"
    layouts = (RunLayout(8),)
