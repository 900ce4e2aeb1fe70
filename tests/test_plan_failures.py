"""Simulated course of a planned run by a `simulator` part, compared with the closed form."""

from __future__ import annotations

import pytest

from gangline.plugin.registry import installed
from gangline_basics.cluster.file import Quantity, load_cluster
from gangline_planner.assumed import complete_words, explain
from gangline_planner.failures import COURSES, MOST, format_goodput, simulate_goodput
from gangline_planner.forecast import forecast

HUNDRED_THOUSAND = "parallel=ddp launch.processes=98304 batch.global_size=98304 batch.micro_size=1 precision=bf16"


def plan_with(**numbers: float):
    case, cluster = complete_words(HUNDRED_THOUSAND.split()), load_cluster("h100_ib")
    said = {name.replace("__", "."): Quantity(value, "a test") for name, value in numbers.items()}
    cluster = cluster.replace_numbers({"storage.bandwidth": Quantity(1e6, "a test: saves take seconds"), **said})
    return forecast(explain(case, case.run, cluster), cluster)


def test_simulated_goodput_matches_closed_form():
    """Simulate a failure about every half hour, and restarts of ten minutes."""
    plan = plan_with()
    found = simulate_goodput(plan)
    assert found.by == "simulator=events"
    assert found.days == 30
    assert found.failures == pytest.approx(30 * 24 * 3600 / plan.reliability.mtbf_seconds, rel=0.1)
    assert 48 < found.spares < 96  # 47 nodes in repair on average
    assert 0.3 < plan.goodput < 0.8
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares.get("idle", 0.0) < 0.01
    assert found.goodput == pytest.approx(plan.goodput, abs=0.05)
    assert f"goodput {found.goodput:.1%}" in format_goodput(found)


def test_too_many_failures_skip_simulation():
    plan = plan_with(failure__hours=1.0)
    assert 30 * 86400 / plan.reliability.mtbf_seconds * COURSES > MOST
    assert simulate_goodput(plan) is None
    assert plan.goodput == 0.0  # failures are more frequent than restarts can finish


def test_plan_without_simulator_has_closed_form_only(monkeypatch):
    plan = plan_with()
    with monkeypatch.context() as patch:
        patch.setenv("GANGLINE_PLUGINS", "planner")
        installed.cache_clear()
        assert simulate_goodput(plan) is None
    installed.cache_clear()
