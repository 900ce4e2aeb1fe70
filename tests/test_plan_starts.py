"""Commands printed by `gangline plan search`: each starts, trains and ends with the loss of one process."""

from __future__ import annotations

import json

import pytest

from gangline.cli.main import main
from gangline_testkit.real_runs import RealRuns

SHAPE = ("model.dim=32", "model.layers=4", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=64")
BATCH = ("precision=fp32", "batch.global_size=8", "batch.sequence_length=16")
REST = (
    "run.steps=2",
    "run.sample=0",
    "run.device=cpu",
    "validate.every=null",
    "track=[jsonl]",
    "track.jsonl.figure=false",
)
RUNS = 4


@pytest.fixture
def runs(tmp_path):
    with RealRuns(tmp_path) as found:
        yield found


def printed(capsys, *words: str) -> list[list[str]]:
    """Return the arguments of each `train` command that `gangline plan search` prints."""
    assert main(["plan", "search", "parallel=3d", *SHAPE, *BATCH, *words, "cluster=h100_ib"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "  train " in line]
    return [line.split("  train ")[1].split() for line in lines]


def different(lines: list[list[str]]) -> list[list[str]]:
    """Return the first command of each pipeline schedule and tensor-parallel size, at most `RUNS` commands."""
    found: dict[tuple[str, ...], list[str]] = {}
    for words in lines:
        key = tuple(sorted(word for word in words if word.startswith(("parallel.schedule=", "parallel.tp="))))
        found.setdefault(key, words)
    return list(found.values())[:RUNS]


def test_layouts_from_search_match_one_process(runs, capsys):
    rows = [
        *different(printed(capsys, "launch.processes=4"))[: RUNS - 2],
        *different(printed(capsys, "launch.processes=4", "parallel.pp=4"))[-1:],
        *different(printed(capsys, "launch.processes=2", "parallel.tp=2"))[:1],
    ]
    assert len({json.dumps(row) for row in rows}) == RUNS
    runs.train("run.dir=alone", "parallel=single", "launch.processes=1", *SHAPE, *BATCH, *REST)
    alone = [record["loss"] for record in runs.read_records("alone")]
    for number, words in enumerate(rows):
        runs.train(f"run.dir=row-{number}", *words, *REST)
        assert [record["loss"] for record in runs.read_records(f"row-{number}")] == pytest.approx(alone, rel=1e-4), (
            words
        )
