"""Triton kernels beside the plain operators whose place they take."""

from __future__ import annotations

from pathlib import Path

from gangline_testkit.interpreted import run_interpreted


def test_row_kernels_match_plain_operators():
    run_interpreted(Path(__file__).with_name("interpreted_permute.py"))
