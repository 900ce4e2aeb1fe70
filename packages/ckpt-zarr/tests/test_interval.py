"""`checkpoint.every=auto`: closed form compared with a simulation, measured save costs, real runs."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from runs import Runs
from stepping import REGISTRY, Job

from gangline.config.check import check
from gangline.config.compose import compose_one
from gangline.errors import UserError
from gangline.run import attempts
from gangline.run.attempts import Attempt
from gangline_ckpt_zarr.save import interval
from gangline_ckpt_zarr.save.interval import (
    FIRST_COST,
    PRIOR_SECONDS,
    Interval,
    compute_best_interval,
    compute_slowdown,
    measure_mtbf,
)
from gangline_testkit import checkpointer_ranks as kit


def expected_seconds(between: float, cost: float, mtbf: float) -> float:
    """Return the wall time for one second of progress if failures are a Poisson process: exact (Daly 2006, eq. 20).

    Completing T = `between` seconds of work and a save of d = `cost` seconds without a failure takes
    M (e^((T + d) / M) - 1), where M is `mtbf`.
    """
    return mtbf * math.expm1((between + cost) / mtbf) / between


@pytest.mark.parametrize(
    ("cost", "mtbf"),
    [(cost, mtbf) for cost in (0.01, 1.0, 30.0, 300.0) for mtbf in (600.0, 21600.0, 2592000.0) if cost < mtbf / 4],
)
def test_best_interval_is_optimal_within_one_thousandth(cost: float, mtbf: float) -> None:
    best = compute_best_interval(cost, mtbf)
    reached = expected_seconds(best, cost, mtbf)
    for factor in (0.25, 0.5, 0.7, 0.9, 1.1, 1.4, 2.0, 4.0):
        assert reached <= expected_seconds(factor * best, cost, mtbf)
    finest = min(expected_seconds(best * (0.5 + n / 1000), cost, mtbf) for n in range(1500))
    assert reached <= finest * 1.001


def simulated_seconds(between: float, cost: float, mtbf: float, work: float, draw: random.Random) -> float:
    """Simulate `work` seconds of training, saved every `between` seconds, and return the wall time.

    A failure loses the unsaved work.
    """
    time = done = 0.0
    left = draw.expovariate(1 / mtbf)  # seconds to the next failure
    while done < work:
        step = min(between, work - done) + cost
        if step < left:
            left -= step
            time += step
            done += step - cost
        else:
            time += left
            left = draw.expovariate(1 / mtbf)
    return time


def test_best_interval_matches_simulation() -> None:
    """Simulate 20 million seconds for each of five intervals, with the same mean time between failures."""
    cost, mtbf = 20.0, 3600.0
    best = compute_best_interval(cost, mtbf)
    work = 2e7
    means = {
        factor: simulated_seconds(factor * best, cost, mtbf, work, random.Random(7))
        for factor in (0.4, 0.7, 1, 1.5, 2.5)
    }
    assert min(means, key=lambda factor: means[factor]) == 1
    for factor, seconds in means.items():
        exact = work * expected_seconds(factor * best, cost, mtbf)
        assert seconds == pytest.approx(exact, rel=0.01), factor


def test_interval_equals_mtbf_if_saves_are_costly() -> None:
    assert compute_best_interval(100.0, 50.0) == 50.0
    assert compute_best_interval(100.0, 51.0) == pytest.approx(51.0, rel=0.5)
    for cost in (0.5, 1, 2, 4, 8):
        assert compute_best_interval(2 * cost, 3600) > compute_best_interval(cost, 3600)
        assert compute_best_interval(cost, 7200) > compute_best_interval(cost, 3600)


def test_save_cost_is_blocking_time_plus_slowdown() -> None:
    found = Interval(3600.0)
    assert found.cost == FIRST_COST
    for _ in range(10):
        assert not found.is_due(1.0, saving=False)
    found.note_save(0.25)
    for seconds in (1.5, 1.3, 1.0):
        assert not found.is_due(seconds, saving=True)
    assert found.cost == FIRST_COST
    assert not found.is_due(1.0, saving=False)
    assert found.cost == pytest.approx(0.25 + 0.8)
    assert found.seconds == compute_best_interval(found.cost, 3600.0)


def test_save_is_due_after_interval_without_running_save() -> None:
    found = Interval(3600.0)
    steps = 0
    while not found.is_due(1.0, saving=False):
        steps += 1
    assert abs(steps + 1 - found.seconds) <= 1
    assert not found.is_due(1000.0, saving=True)
    assert found.is_due(1.0, saving=False)
    found.note_save(0.1)
    assert not found.is_due(1.0, saving=False)


def test_copy_slowdown_adds_cost_without_delaying_saves() -> None:
    """Check also a copy that is still running when the next save begins."""
    found = Interval(3600.0)
    for _ in range(10):
        found.is_due(1.0, saving=False)
    found.note_save(0.25)
    found.is_due(1.5, saving=True)
    found.is_due(1.2, saving=False, copying=True)
    assert found.is_due(10_000.0, saving=False, copying=True)
    found.note_save(0.5)
    assert found.cost == pytest.approx(0.25 + 0.5 + 0.2 + 9_999)
    found.is_due(1.0, saving=False, copying=True)
    found.is_due(1.0, saving=False)
    assert found.cost == pytest.approx((0.25 + 0.5 + 0.2 + 9_999 + 0.5) / 2)


def test_slowdown_ignores_single_slow_step() -> None:
    assert compute_slowdown([1.0, 1.0], [1.0, 9.0, 1.0]) == 0
    assert compute_slowdown([2.0, 1.0], [1.0, 1.0, 9.0]) == 1
    assert compute_slowdown([], [1.0]) == compute_slowdown([1.0], []) == 0


def test_mtbf_is_measured_from_run_attempts(tmp_path: Path) -> None:
    assert measure_mtbf(tmp_path) == PRIOR_SECONDS
    began = datetime(2026, 1, 1, tzinfo=UTC)
    for hours in (0, 10, 20, 29):
        when = (began + timedelta(hours=hours)).isoformat(timespec="seconds")
        attempts.append(tmp_path, Attempt(1, None, why="resume", time=when))
    now = began + timedelta(hours=36)
    assert measure_mtbf(tmp_path, now) == pytest.approx((24 + 36) * 3600 / 4)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("checkpoint.every=0", "checkpoint.every=0 must be at least 1"),
        ("checkpoint.every=-3", "checkpoint.every=-3 must be at least 1"),
        ("checkpoint.mtbf_hours=0", "checkpoint.mtbf_hours=0"),
        ("checkpoint.mtbf_hours=-1", "checkpoint.mtbf_hours=-1"),
        ("checkpoint.deadline_seconds=0", "checkpoint.deadline_seconds=0"),
        ("checkpoint.keep_last=0", "checkpoint.keep_last=0"),
        ("checkpoint.keep_every=0", "checkpoint.keep_every=0"),
        ("checkpoint.memory_every=0", "checkpoint.memory_every=0"),
        ("checkpoint.durable_every=5", "checkpoint.durable is not set"),
        (
            "checkpoint.every=2 checkpoint.durable=far checkpoint.durable_every=5",
            "durable_every=4 or checkpoint.durable_every=6",
        ),
        (
            "checkpoint.every=9 checkpoint.durable=far checkpoint.durable_every=5",
            "is not a multiple of checkpoint.every=9",
        ),
        ("checkpoint.every=auto checkpoint.durable=far checkpoint.durable_every=5", "needs a fixed checkpoint.every"),
        ("checkpoint.durable_keep_last=5", "checkpoint.durable is not set"),
    ],
)
def test_check_names_invalid_option(word: str, said: str) -> None:
    run = compose_one(["recipe=tiny", "checkpoint=zarr", *word.split()])
    with pytest.raises(UserError) as caught:
        check(run)
    assert said in str(caught.value)


def test_memory_saves_do_not_delay_disk_saves(tmp_path: Path) -> None:
    """Get the due saves of 240 steps of 2 s; the disk interval is 415 s until a save is measured, then about 30 s."""
    job = Job(tmp_path, "checkpoint.every=auto", "checkpoint.mtbf_hours=24", "checkpoint.memory_every=2")
    checkpointer, asked = job.start(), []
    try:
        for step in range(1, 241):
            request = checkpointer.get_due_save(step, 2.0, "auto")
            if request is not None:
                asked += request.tiers
                handle = checkpointer.save(
                    request, kit.make_shards(REGISTRY, step), REGISTRY, kit.make_document(step, 1, step)
                )
                handle.settled.result()
    finally:
        job.end()
    assert asked.count("memory") >= 115
    assert asked.count("disk") >= 1


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with Runs(tmp_path) as found:
        yield found


def test_invalid_option_exits_with_code_two_without_traceback(runs: Runs) -> None:
    printed = runs.train("run.dir=out", "checkpoint.every=often", "checkpoint.keep_last=all", code=2)
    assert "checkpoint.every=often: expected an integer or auto or null" in printed
    assert "checkpoint.keep_last=all: expected an integer or null" in printed
    assert "Traceback" not in printed
    assert not (runs.directory / "out").exists()


def test_auto_interval_saves_consistently_on_all_ranks(runs: Runs) -> None:
    """Set one failure per 0.05 s, so that the run saves as often as it can; ranks that disagree would hang."""
    words = ("run.dir=out", "run.steps=100000", "checkpoint.every=auto", f"checkpoint.mtbf_hours={0.05 / 3600}")
    process = runs.fork(*words, "checkpoint.keep_last=3", "parallel=ddp", "launch.processes=2")
    runs.wait_for_step(process, "out", 3)
    while len(saves := [record["step"] for record in runs.read_records("out") if record["checkpoint"]]) < 4:
        runs.wait_for_step(process, "out", runs.read_records("out")[-1]["step"] + 1)
    os.kill(process.pid, signal.SIGTERM)
    runs.finish(process, code=75)
    records = runs.read_records("out")
    assert [record["step"] for record in records if record["checkpoint"]][: len(saves)] == saves
    assert len([*(runs.directory / "out" / "checkpoints").glob("*/zarr.json")]) == 3


def test_docstring_cites_interval_papers() -> None:
    assert interval.__doc__ is not None
    assert "Young, CACM 17(9), 1974" in interval.__doc__
    assert "Daly, FGCS 22(3), 2006" in interval.__doc__
