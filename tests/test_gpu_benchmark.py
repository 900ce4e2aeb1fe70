"""`benchmarks/gpu.py` on a CPU with small sizes: every row of its table runs, and wrong results are reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu.py"


def dry(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the script with small sizes on the CPU."""
    command = [sys.executable, str(SCRIPT), "--tiny", "--device", "cpu", *words]
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(command, capture_output=True, text=True, env=given)


def lines(ran: subprocess.CompletedProcess[str], table: Path) -> dict[str, dict[str, str]]:
    assert table.exists(), ran.stdout + ran.stderr
    return {line["name"]: line for line in json.loads(table.read_text())["lines"]}


@pytest.fixture
def gpu(monkeypatch):
    """Import the script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu

    return gpu


FEW = (
    "ring kernel",
    "fp8",
    "checkpoint",
    "8B blocks, fp8",
    "grouped matmuls",
    "gated product of experts",
    "grouped rate",
    "cross-entropy",
    "profile, 8B blocks",
)
OF_A_GPU = {"captured streams", "staging rate", "documents", "NCCL", "registered memory", "host waits"}


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_every_benchmark_runs_on_cpu(gpu, tmp_path, few):
    groups = gpu.groups()
    names = FEW if few else [name for lines in groups.values() for name in lines]
    ran = dry("--out", str(tmp_path), "--only", *names)
    found = lines(ran, tmp_path / "all.json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    left = {name for name, line in found.items() if line["verdict"] == "left out"}
    assert left <= OF_A_GPU | {"gradients of weights"}, "what only a GPU has"
    assert set(names) == set(found)
    for name in set(found) - left:
        assert found[name]["verdict"] == ("ok" if name in groups["checks"] else ""), ran.stdout + ran.stderr


def test_benchmarks_beyond_time_limit_are_reported(tmp_path):
    ran = dry("checks", "--out", str(tmp_path), "--seconds", "0", "--only", "ring kernel")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert lines(ran, tmp_path / "checks.json")["ring kernel"]["found"] == "the time limit of --seconds was reached"


def test_wrong_result_is_reported(gpu, monkeypatch, capsys):
    import gpu_checks as checks

    monkeypatch.setattr(
        checks.blocks, "CPU", checks.blocks.CPU._replace(forward=lambda *a: checks.blocks.MATH.forward(*a[:5], 0.5))
    )
    assert gpu.main(["--tiny", "--device", "cpu", "--only", "ring kernel"]) == 1
    said = capsys.readouterr().out
    assert "WRONG    ring kernel" in said
    assert "relative difference" in said


def test_benchmark_runs_without_installed_gangline(tmp_path):
    """Hide the installed packages of gangline, as on a machine with only torch and a clone."""
    packages = Path(__import__("torch").__file__).parent.parent
    bare = tmp_path / "site"
    bare.mkdir()
    for entry in packages.iterdir():
        if not entry.name.startswith(("gangline", "_gangline", "__editable__")) and entry.suffix != ".pth":
            (bare / entry.name).symlink_to(entry)
    command = [sys.executable, "-S", str(SCRIPT), "--tiny", "--device", "cpu", "--only", "ring kernel", "layout tp"]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(bare)})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 checks passed" in ran.stdout
