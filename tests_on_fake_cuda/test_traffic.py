"""The kernels of a block, and the bytes that they move, are those that docs/how-to/fake-gpu.md states.

To update the page: `GANGLINE_UPDATE=1 nox -s fake_cuda`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from page import UPDATES, read_table, write_table

HEADER = "| block | | kernels | bytes | estimated time | share of the peak, at most |"
LIMITS = {"Llama 3 8B": 45, "Qwen3 30B-A3B": 75}  # kernels of a compiled block


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, dict[str, Any]]]:
    """Return block -> "eager" or "compiled" -> its numbers, from a process in which Triton interprets no kernel."""
    command = [sys.executable, str(Path(__file__).with_name("traffic.py"))]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_page_states_the_kernels_of_each_block(counted: dict[str, dict[str, dict[str, Any]]]) -> None:
    rows = [
        f"| {block} | {way} | {found['kernels']} "
        f"| {found['GB']:.1f} GB | {found['ms']:.1f} ms | {found['of peak']:.0%} |"
        for block, ways in counted.items()
        for way, found in ways.items()
    ]
    table = [HEADER, "|---" * 6 + "|", *rows]
    if UPDATES:
        write_table("kernels", table)
    assert read_table("kernels") == table


def test_a_compiled_block_has_few_kernels(counted: dict[str, dict[str, dict[str, Any]]]) -> None:
    for block, most in LIMITS.items():
        ways = counted[block]
        assert ways["compiled"]["kernels"] <= most
        assert ways["compiled"]["GB"] < ways["eager"]["GB"]
