"""Ranks that are slower than the others, from the rows of the step record."""

from __future__ import annotations

import random
from dataclasses import replace

from gangline.health import Verdict
from gangline.testing.health import healthy
from gangline_health.monitors.straggler_options import StragglersOptions
from gangline_health.monitors.stragglers import OWN, StragglersMonitor

RANKS = 8


def rows(steps: int, slow: int | None = None, since: int = 0, phase: str = "forward", seed: int = 0):
    """Records of ranks with noise of five percent and pauses now and then; one is slow in one phase."""
    draw = random.Random(seed)
    usual = {"data": 0.001, "forward": 0.1, "backward": 0.2, "optimizer": 0.02, "other": 0.004}
    for record in healthy(steps, seed):
        own = {name: [one * abs(draw.gauss(1.0, 0.05)) for _ in range(RANKS)] for name, one in usual.items()}
        if draw.random() < 0.1:  # any rank may be held up once
            own["forward"][draw.randrange(RANKS)] += 0.5
        if slow is not None and record.step >= since:
            own[phase][slow] *= 2.5
        total = [sum(own[name][rank] for name in OWN) for rank in range(RANKS)]
        own["collective"], own["checkpoint"] = [max(total) - one for one in total], [0.0] * RANKS
        yield replace(record, rank_phases=own, step_seconds=max(total))


def said(monitor: StragglersMonitor, records) -> list[Verdict]:
    return [verdict for record in records for verdict in monitor.observe(record)]


def test_ranks_that_are_held_up_now_and_then_are_no_stragglers():
    for seed in range(10):
        assert said(StragglersMonitor(StragglersOptions()), rows(500, seed=seed)) == []


def test_who_is_slow_in_what_since_when_and_what_it_costs():
    for seed in range(10):
        records = rows(300, slow=5, since=100, phase="backward", seed=seed)
        (verdict,) = said(StragglersMonitor(StragglersOptions()), records)
        assert verdict.where == "rank 5"
        assert verdict.details["phase"] == "backward"
        assert 90 <= verdict.details["since"] <= 110
        assert 0.1 < verdict.details["cost_seconds"] < 0.35


def test_a_rank_is_told_again_after_a_while_and_forgotten_when_it_is_as_fast_as_the_others():
    monitor = StragglersMonitor(StragglersOptions(again=50))
    assert len(said(monitor, rows(120, slow=2))) == 3
    assert said(monitor, rows(100, seed=1)) == []
    assert monitor.since == {}


def test_one_rank_and_ranks_that_say_nothing_are_no_stragglers():
    monitor = StragglersMonitor(StragglersOptions())
    alone = {name: [1.0] for name in (*OWN, "collective", "checkpoint")}
    records = [
        replace(record, rank_phases=phases) for record, phases in zip(healthy(40), [None, alone] * 20, strict=True)
    ]
    assert said(monitor, records) == []
