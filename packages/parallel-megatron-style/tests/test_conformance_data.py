"""Conformance suite for strategies, run on `parallel=fsdp` and `hsdp`, bit-identical."""

from __future__ import annotations

from gangline_testkit import StrategySuite
from gangline_testkit.scenarios import RunLayout


class TestFsdp(StrategySuite):
    choice = "parallel=fsdp"
    can = {"exact", "exact tied"}
    layouts = (  # other layouts run nightly
        RunLayout(1),
        RunLayout(4),
        RunLayout(2, ("parallel.zero=1",)),
        RunLayout(2, ("parallel.zero=0",)),
    )


class TestHsdp(StrategySuite):
    choice = "parallel=hsdp"
    can = {"exact", "exact tied"}
    layouts = (RunLayout(4),)
