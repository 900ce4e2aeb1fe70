"""`parallel.record=true`: recorded spans of a pipeline as a metric, drawn from metrics.jsonl."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

from gangline.errors import UserError
from gangline.mesh import Mesh
from gangline.model.compose import compose_model
from gangline.run.directory import RunDirectory
from gangline_parallel_megatron_style.commands import main
from gangline_parallel_megatron_style.pipeline.record import SPANS, make_timeline
from gangline_parallel_megatron_style.pipeline.schedules import make_schedule
from gangline_testkit import strategy_ranks
from gangline_testkit.pool import get_pool
from gangline_testkit.runs import build_small_run
from gangline_testkit.strategy_ranks import StrategyJob

SETTINGS = ("parallel=pp", "parallel.record=true", "launch.processes=2", "parallel.schedule=zb_h1")


@pytest.fixture(scope="module")
def trained():
    """Train with recording on two ranks and return the run and the results of the ranks."""
    run = build_small_run(*SETTINGS)
    tree, plan = compose_model(run)
    job = StrategyJob(
        "gangline_parallel_megatron_style.build:build", run, tree, plan, Mesh.of({"pp": 2}), torch.float32, "whole", 2
    )
    return run, get_pool(2).run(strategy_ranks.train, job)


def test_all_ranks_record_the_same_spans(trained):
    run, ranks = trained
    one, two = (rank.steps[-1].metrics for rank in ranks)
    assert one[SPANS] == two[SPANS]
    found = make_timeline(one[SPANS], make_schedule("zb_h1", ranks=2, microbatches=run.batch.global_size))
    assert found.start == 0
    assert all(start <= end for spans in found.spans for start, end in spans)
    for spans in found.spans:
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert one["pipeline/bubble"] == found.bubble


def test_draw_reads_the_run_directory(trained, tmp_path, capsys):
    _, ranks = trained
    directory = RunDirectory.create(build_small_run(*SETTINGS, f"run.dir={tmp_path / 'run'}")).path
    lines = [{"step": number + 1, "metrics": step.metrics} for number, step in enumerate(ranks[0].steps)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["draw", str(directory)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Pipeline zb_h1 of run, step 2: 2 ranks, ")
    assert "time in ms" in said
    assert "rank 1" in said
    with (directory / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    assert main(["draw", str(directory)]) == 0
    assert "gangline parallel draw: note: " in capsys.readouterr().err


def test_draw_without_recorded_spans_names_the_option(tmp_path):
    directory = RunDirectory.create(build_small_run(*SETTINGS, f"run.dir={tmp_path / 'run'}")).path
    (directory / "metrics.jsonl").write_text('{"step": 1, "metrics": {}}\n')
    with pytest.raises(UserError, match=r"parallel\.record=true"):
        main(["draw", str(directory)])


def test_spans_of_another_schedule_are_refused():
    with pytest.raises(ValueError, match="1 actions are recorded, but the schedule has 12"):
        make_timeline([0.0, 1.0], make_schedule("1f1b", ranks=2, microbatches=3))
