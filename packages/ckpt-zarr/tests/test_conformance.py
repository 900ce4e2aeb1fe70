"""Conformance suite of the testkit for checkpointers, run on `checkpoint=zarr`."""

from __future__ import annotations

from gangline_testkit.checkpointer import CheckpointerSuite


class TestZarr(CheckpointerSuite):
    choice = "checkpoint=zarr"
    can = frozenset({"reshard", "async", "atomic", "verify", "retention"})
