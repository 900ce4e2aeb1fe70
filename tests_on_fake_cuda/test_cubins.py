"""Every Triton kernel compiles for A100, H100 and B200, and keeps its values in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GPUS = {"80": "A100", "90": "H100", "100": "B200"}
REGISTERS = 128  # of a thread, up to which 16 warps run at a time on a multiprocessor


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[int]]]:
    """Return launch -> compute capability -> [registers, bytes of stack], from a process that interprets no kernel."""
    command = [sys.executable, str(Path(__file__).with_name("cubins.py")), *GPUS]
    settings = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "TRITON_INTERPRET": "0"}
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_each_kernel_is_compiled_for_each_gpu(compiled: dict[str, dict[str, list[int]]]) -> None:
    names = {launch.split("(")[0] for launch in compiled}
    launched = {"_log_sum_exp", "_compute_gradient", "_gather_rows_kernel", "_gather_gradients_kernel"}
    launched |= {"_join_kernel", "_compute_gradients_kernel"}
    assert names == launched | {"_find_largest", "_quantise_tile"}
    for launch, found in compiled.items():
        float8 = launch.startswith(("_find_largest", "_quantise_tile"))
        assert list(found) == [arch for arch in GPUS if not (float8 and arch == "80")], launch


def test_no_kernel_spills_registers(compiled: dict[str, dict[str, list[int]]]) -> None:
    for launch, found in compiled.items():
        for arch, (registers, stack) in found.items():
            assert 16 <= registers <= REGISTERS, launch
            assert stack == 0, f"{launch} spills {stack} bytes on {GPUS[arch]}"
