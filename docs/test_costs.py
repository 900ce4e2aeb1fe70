"""Compare docs/costs.md with the current predictions of the planner: a part of the page by day, all of it at night."""

from __future__ import annotations

import costs
import pytest

from gangline_basics.cluster.file import load_cluster
from gangline_planner.table import MODELS, WORLDS, list_assumptions, plan_row


@pytest.mark.parametrize("world", [8, 64])
def test_cost_row_matches_current_plan(world):
    assert plan_row("8B", world, load_cluster(costs.CLUSTER)).text in costs.PAGE.read_text().splitlines()


def test_cost_page_has_all_rows_and_assumptions():
    page = costs.PAGE.read_text()
    assert all(line in page for line in list_assumptions(load_cluster(costs.CLUSTER)))
    for model in MODELS:
        for world in WORLDS:
            assert f"| {model} | {world:,} |" in page


@pytest.mark.nightly
def test_cost_page_is_current():
    assert costs.PAGE.read_text() == costs.page(), "python docs/costs.py"
