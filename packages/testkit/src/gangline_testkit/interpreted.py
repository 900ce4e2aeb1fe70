"""Tests of Triton kernels without a GPU, in a separate process because Triton reads its mode when imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_interpreted(tests: Path) -> None:
    """Run a file of tests in which Triton interprets kernels on CPU tensors. Raises AssertionError with the output.

    Skips the test on systems without Triton.
    """
    if sys.platform != "linux":
        pytest.skip("Triton is for Linux alone")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tests)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment | {"TRITON_INTERPRET": "1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout, ran.stdout
