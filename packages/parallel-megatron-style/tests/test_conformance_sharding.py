"""Conformance suite for strategies, run on tensor, pipeline, context and 3D parallelism.

One rank is the same whatever the part: `test_conformance_data` has it. Of each axis here is what differs in kind; more
ranks of the same are nightly (`test_conformance_nightly`), and in compositions by day.
"""

from __future__ import annotations

from gangline_testkit import StrategySuite
from gangline_testkit.scenarios import RunLayout

FEW = ("batch.global_size=4",)  # no axis here divides the samples, and what is sent for each costs
LONG = ("model.layers=4", "batch.global_size=8", "batch.micro_size=1")


class TestTp(StrategySuite):
    choice = "parallel=tp"
    settings = FEW
    layouts = (
        RunLayout(2, ("model.kv_heads=1",)),  # which both ranks hold
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
