"""Triton kernels of float8 quantization, run under the Triton interpreter."""

from __future__ import annotations

from pathlib import Path

from gangline_testkit.interpreted import run_interpreted


def test_quantise_kernels_pass_under_triton_interpreter():
    run_interpreted(Path(__file__).with_name("interpreted_quantise.py"))
