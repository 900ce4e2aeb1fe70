"""`gangline plan search`: every row passes `check`, is in order, and is what a plan of its words says."""

from __future__ import annotations

import json

import pytest

from gangline.cli.main import main
from gangline.cluster import Quantity, load_cluster
from gangline.config import compose_one
from gangline_planner.assumed import explain, planned, refused
from gangline_planner.choose import alternatives
from gangline_planner.forecast import forecast
from gangline_planner.search import search

MODEL = "model.layers=8 model.heads=8 model.kv_heads=8"
WORDS = f"parallel=3d launch.processes=8 batch.global_size=16 batch.micro_size=1 {MODEL}"


def test_the_fastest_of_all_alternatives_is_first_and_nothing_is_pruned_that_is_faster():
    case, cluster = planned(WORDS.split()), load_cluster("h100_ib")
    fit, large = search(case, cluster, shown=3)
    every = sorted(
        forecast(explain(case, run, cluster), cluster).step.seconds
        for run, _ in alternatives(case)
        if refused(run) is None
    )
    assert [one.plan.step.seconds for one in fit] == pytest.approx(every[:3])
    assert len(every) > 10
    assert large == []


def test_what_does_not_fit_says_what_it_lacks():
    small = load_cluster("h100_ib").with_numbers({"memory.bytes": Quantity(25e6, "a test")})
    fit, large = search(planned(WORDS.split()), small, shown=4)
    assert fit
    assert large
    assert all(one.plan.memory <= 25e6 for one in fit)
    assert [one.lacks for one in large] == sorted(one.plan.memory - 25e6 for one in large)


def test_each_row_is_a_line_that_passes_check(capsys):
    assert main(["plan", "search", *WORDS.split(), "parallel.tp=2", "cluster=h100_ib", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["layouts"]
    assert len(rows) > 3
    for row in rows:
        run = compose_one([*WORDS.split(), "parallel.tp=2", *row["words"]])
        assert refused(run) is None
        assert row["mesh"]["tp"] == 2
