"""`health.monitors.stragglers`: ranks slower than the others, from the step records."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gangline.health import Action, Agreed, Verdict
from gangline.mesh import Mesh
from gangline_health.config import Budget, Playbook, Playbooks
from gangline_health.monitors.steadily_slow import SlowRanks
from gangline_health.monitors.straggler_options import StragglersOptions
from gangline_health.monitors.stragglers import OWN, StragglersMonitor
from gangline_health.playbooks import respond
from gangline_testkit.health import make_healthy

RANKS = 8


def rows(
    steps: int, slow: int | None = None, since: int = 0, phase: str = "forward", seed: int = 0, times: float = 2.5
):
    """Records of ranks with noise of five percent and pauses now and then; one is slow in one phase."""
    draw = random.Random(seed)
    usual = {"data": 0.001, "forward": 0.1, "backward": 0.2, "optimizer": 0.02, "other": 0.004}
    for record in make_healthy(steps, seed):
        own = {name: [one * abs(draw.gauss(1.0, 0.05)) for _ in range(RANKS)] for name, one in usual.items()}
        if draw.random() < 0.1:  # any rank may be held up once
            own["forward"][draw.randrange(RANKS)] += 0.5
        if slow is not None and record.step >= since:
            own[phase][slow] *= times
        total = [sum(own[name][rank] for name in OWN) for rank in range(RANKS)]
        own["collective"], own["checkpoint"] = [max(total) - one for one in total], [0.0] * RANKS
        yield replace(record, rank_phases=own, step_seconds=max(total))


def staged(records, pp: int):
    """The same, where the last of the stages has the head: it takes twice as long."""
    for record in records:
        per = RANKS // pp
        own = {
            name: [one * (2 if rank >= RANKS - per else 1) for rank, one in enumerate(row)]
            for name, row in record.rank_phases.items()
        }
        yield replace(record, rank_phases=own)


def of_stages(pp: int, **options) -> StragglersMonitor:
    monitor = StragglersMonitor(StragglersOptions(**options))
    mesh = Mesh.of({"pp": pp, "dp_replicate": RANKS // pp})
    runtime = cast(Any, SimpleNamespace(registry=SimpleNamespace(mesh=mesh)))
    monitor.attach(runtime, cast(Any, None), None, cast(Any, None))
    return monitor


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_longer_stage_is_not_a_straggler(pp: int) -> None:
    monitor = of_stages(pp, steady_steps=200)
    assert said(monitor, staged(rows(420), pp)) == []
    monitor.load_state({})  # another start of the same layout
    assert said(monitor, staged(rows(420), pp)) == []
    assert ("no two ranks do equal work" in monitor.describe()) == (pp == RANKS)


@pytest.mark.parametrize("pp", [2, 4])
def test_straggler_in_a_short_stage_is_named(pp: int) -> None:
    (verdict,) = said(of_stages(pp, window=16), staged(rows(300, slow=1, since=100, times=3.0), pp))
    assert verdict.where == "rank 1"
    assert f"the median of {RANKS // pp} ranks of its stage" in verdict.evidence
    assert verdict.details["phase"] == "forward"


def said(monitor: StragglersMonitor, records) -> list[Verdict]:
    return [verdict for record in records for verdict in monitor.observe(record)]


def test_occasional_delays_are_not_stragglers():
    for seed in range(10):
        assert said(StragglersMonitor(StragglersOptions()), rows(500, seed=seed)) == []


def test_straggler_verdict_names_phase_start_and_cost():
    for seed in range(10):
        records = rows(300, slow=5, since=100, phase="backward", seed=seed)
        (verdict,) = said(StragglersMonitor(StragglersOptions()), records)
        assert verdict.where == "rank 5"
        assert verdict.details["phase"] == "backward"
        assert 90 <= verdict.details["since"] <= 110
        assert 0.1 < verdict.details["cost_seconds"] < 0.35


def test_straggler_is_reported_again_until_recovery():
    monitor = StragglersMonitor(StragglersOptions(again=50))
    assert len(said(monitor, rows(120, slow=2))) == 3
    assert said(monitor, rows(100, seed=1)) == []
    assert monitor.since == {}


def test_single_or_silent_ranks_are_not_stragglers():
    monitor = StragglersMonitor(StragglersOptions())
    alone = {name: [1.0] for name in (*OWN, "collective", "checkpoint")}
    records = [
        replace(record, rank_phases=phases) for record, phases in zip(make_healthy(40), [None, alone] * 20, strict=True)
    ]
    assert said(monitor, records) == []


def test_constantly_slower_rank_is_noted() -> None:
    """5 % in its matmuls are lost in the noise of every single step, and are no straggler's."""
    for seed in range(5):
        monitor = StragglersMonitor(StragglersOptions())
        found = said(monitor, rows(1002, slow=3, phase="backward", seed=seed, times=1.08))
        assert [(one.kind, one.where, one.suggestion) for one in found] == [("slow-rank", "rank 3", Action.NOTE)]
        assert 1.03 < found[0].details["times"] < 1.07


def test_slow_rank_playbook_can_exclude() -> None:
    (found,) = said(StragglersMonitor(StragglersOptions()), rows(1002, slow=3, phase="backward", times=1.08))
    agreed = Agreed((found,))
    default = respond(Playbooks(), Budget(), agreed, 1001)
    assert default is not None
    assert (default.action, default.exclude) == (Action.NOTE, ())
    asked = respond(Playbooks(slow_rank=Playbook(["exclude"])), Budget(), agreed, 1001)
    assert asked is not None
    assert (asked.action, asked.exclude, asked.before_step) == (Action.RESTART, ("rank 3",), None)


def test_occasionally_slower_rank_is_not_noted() -> None:
    draw = random.Random(0)
    found = SlowRanks(1.03, 1000)
    for step in range(20_000):
        times = [draw.gauss(1.0, 0.1) for _ in range(RANKS)]
        times[step // 150 % RANKS] *= 1.2
        assert found.add(times) == {}


def test_all_ranks_give_identical_verdicts() -> None:
    """What is said alike is told once; each rank has its own time for a step."""
    found = list(rows(200, slow=3, since=100))
    other = [replace(record, step_seconds=1.7 * record.step_seconds) for record in found]
    first, second = (said(StragglersMonitor(StragglersOptions()), records) for records in (found, other))
    assert first
    assert first == second
