"""`gangline plan` and `plan search` with only core and the planner installed.

The tests in tests/ plan layouts of other packages.
"""

from __future__ import annotations

import json

import pytest

from gangline.cli.main import main

EIGHT = (
    "parallel=ddp",
    "model=llama3-1b",
    "launch.processes=8",
    "batch.global_size=64",
    "batch.sequence_length=128",
    "batch.micro_size=1",
    "cluster=h100_ib",
)


def planned(capsys, *words: str) -> dict:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_of_ddp_counts_gradient_transfers(capsys):
    eight, one = planned(capsys, *EIGHT), planned(capsys, "parallel=single", *EIGHT[1:2], *EIGHT[3:])
    assert eight["step_seconds"] == pytest.approx(sum(eight["seconds"].values()))
    assert eight["seconds"]["dp"] > 0
    assert one["seconds"]["dp"] == 0
    assert one["seconds"]["compute"] == pytest.approx(8 * eight["seconds"]["compute"], rel=0.01)


def test_search_ranks_installed_strategies(capsys):
    assert main(["plan", "search", *EIGHT]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "train parallel=" in line]
    seconds = [float(line.split()[0]) for line in lines]
    assert len(lines) > 1
    assert seconds == sorted(seconds)
    assert all("parallel=ddp" in line for line in lines)
