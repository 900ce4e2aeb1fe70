"""Triton kernels for the rows of experts, run under the Triton interpreter."""

from __future__ import annotations

from pathlib import Path

from gangline_testkit.interpreted import run_interpreted


def test_row_kernels_match_plain_operators():
    run_interpreted(Path(__file__).with_name("interpreted_permute.py"))
