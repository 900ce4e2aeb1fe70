"""Triton kernels beside the plain operators whose place they take."""

from __future__ import annotations

from pathlib import Path

from gangline_testkit.interpreted import run_interpreted


def test_kernels_of_rows():
    run_interpreted(Path(__file__).with_name("interpreted_permute.py"))
