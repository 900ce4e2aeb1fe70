"""Data parallelism of every kind passes core's suite, bit for bit."""

from __future__ import annotations

from gangline_testkit import StrategySuite
from gangline_testkit.scenarios import Layout


class TestFsdp(StrategySuite):
    choice = "parallel=fsdp"
    can = {"exact", "exact tied"}
    layouts = (  # others are nightly
        Layout(1),
        Layout(4),
        Layout(2, ("parallel.zero=1",)),
        Layout(2, ("parallel.zero=0",)),
    )


class TestHsdp(StrategySuite):
    choice = "parallel=hsdp"
    can = {"exact", "exact tied"}
    layouts = (Layout(4),)
