"""Triton kernels of experts and their rows, run under the Triton interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline_testkit.interpreted import run_interpreted


@pytest.mark.parametrize("kernels", ["permute", "gated"])
def test_kernels_match_plain_operators(kernels):
    run_interpreted(Path(__file__).with_name(f"interpreted_{kernels}.py"))
