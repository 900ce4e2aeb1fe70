"""Conformance suite for strategies, run on further layouts, nightly.

The compositions in test_layouts_compositions.py cover the differences of these layouts by day.
"""

from __future__ import annotations

import pytest
from test_conformance_sharding import FEW, LONG

from gangline_testkit import RunLayout, StrategySuite

pytestmark = pytest.mark.nightly


class TestFurtherTp(StrategySuite):
    choice = "parallel=tp"
    settings = FEW
    layouts = (RunLayout(2), RunLayout(4), RunLayout(4, ("parallel.sequence_parallel=false",)))


class TestFurtherPp(StrategySuite):
    choice = "parallel=pp"
    settings = LONG
    can = {"exact"}
    layouts = (
        RunLayout(2),
        RunLayout(4, ("parallel.schedule=gpipe",)),
        RunLayout(2, ("parallel.schedule=interleaved_1f1b",)),
        RunLayout(2, ("parallel.schedule=zb_v",)),
    )


class TestFurtherFsdp(StrategySuite):
    choice = "parallel=fsdp"
    can = {"exact", "exact tied"}
    layouts = (
        RunLayout(2),
        RunLayout(2, ("parallel.zero=2",)),
        RunLayout(4, ("parallel.zero=1",)),
        RunLayout(4, ("parallel.zero=0",)),
    )


class TestFurtherHsdp(StrategySuite):
    choice = "parallel=hsdp"
    can = {"exact", "exact tied"}
    layouts = (RunLayout(4, ("parallel.zero=1",)),)
