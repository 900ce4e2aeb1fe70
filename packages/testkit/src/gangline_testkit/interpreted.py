"""Run tests of Triton kernels without a GPU, in a separate process because Triton reads its mode on import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_interpreted(tests: Path) -> None:
    """Run a test file with Triton's interpreter, on CPU tensors. Raises AssertionError with the output if a test fails.

    Skips the calling test on systems other than Linux.
    """
    if sys.platform != "linux":
        pytest.skip("Triton supports only Linux")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tests)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment | {"TRITON_INTERPRET": "1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout, ran.stdout
