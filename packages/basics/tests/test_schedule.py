"""`schedule=constant`, `cosine`, `wsd`: learning rate factor as a function of the step, and refused options."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from gangline_basics.schedule.config import PARTS, Constant, Cosine, Wsd
from gangline_basics.schedule.shapes import build_constant, build_cosine, build_wsd


def run_of(steps):
    return SimpleNamespace(steps=steps)


def factors(build, config, steps):
    schedule = build(config, run_of(steps))
    return [schedule(step) for step in range(steps)]


def test_constant_warms_up_linearly():
    assert factors(build_constant, Constant(warmup_steps=3), 6) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert factors(build_constant, Constant(), 2) == [1, 1]


def test_cosine_falls_from_one_to_final_factor():
    found = factors(build_cosine, Cosine(warmup_steps=1, final=0.1), 5)
    assert found == pytest.approx([0.5, 1.0, 0.1 + 0.9 * 0.853553, 0.55, 0.1 + 0.9 * 0.146447], rel=1e-5)
    assert build_cosine(Cosine(warmup_steps=1, final=0.1), run_of(5))(5) == pytest.approx(0.1)


def test_wsd_stays_constant_then_decays_linearly():
    found = factors(build_wsd, Wsd(warmup_steps=1, decay_steps=4, final=0.5), 8)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 0.875, 0.75, 0.625])
    by_default = factors(build_wsd, Wsd(), 100)
    assert by_default[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    assert by_default[5:90] == [1.0] * 85
    assert by_default[90:] == pytest.approx([1 - i / 10 for i in range(10)])


@pytest.mark.parametrize(
    ("warmup", "steps", "fall"),
    [(97, 100, [1, 0.8, 0.6]), (0, 9, [1] * 9), (99, 100, [1]), (100, 100, []), (None, 1, [1])],
)
def test_wsd_default_decay_fits_after_warmup(warmup, steps, fall):
    config = Wsd(warmup_steps=warmup, final=0.4)
    assert config.check(run_of(steps)) == []
    schedule = build_wsd(config, run_of(steps))
    assert [schedule(step) for step in range(config.count_warmup_steps(run_of(steps)), steps)] == pytest.approx(fall)
    assert steps == warmup or schedule(steps) == pytest.approx(0.4)


configs = st.sampled_from([(build_constant, Constant), (build_cosine, Cosine), (build_wsd, Wsd)])


@given(configs, st.integers(1, 200), st.data())
def test_learning_rate_factor_rises_only_in_warmup(chosen, steps, data):
    build, config = chosen
    warmup = data.draw(st.integers(0, steps))
    made = config(warmup_steps=warmup)
    if isinstance(made, Wsd):
        made.decay_steps = data.draw(st.none() | st.integers(0, steps - warmup))
    assert made.check(run_of(steps)) == []
    found = factors(build, made, steps)
    assert all(0 < factor <= 1 for factor in found)
    assert all(a < b for a, b in pairwise(found[: warmup + 1]))
    assert all(a >= b for a, b in pairwise(found[warmup:]))
    schedule = build(made, run_of(steps))
    assert schedule(steps - 1) == found[-1]
    assert schedule(steps + 50) <= found[-1] or warmup == steps


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Constant(warmup_steps=11), r"schedule.warmup_steps=11 exceeds run.steps=10"),
        (Wsd(warmup_steps=5, decay_steps=6), r"schedule.decay_steps=6 does not fit into run.steps=10"),
    ],
)
def test_warmup_or_decay_beyond_run_is_refused(config, message):
    (problem,) = config.check(run_of(10))
    assert message in problem.what


def test_schedule_parts_are_listed():
    assert [part.name for part in PARTS] == ["constant", "cosine", "wsd"]
