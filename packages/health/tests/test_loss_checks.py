"""`health.monitors.numbers`: spikes and divergence of loss and gradient norm, on series with known faults."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from gangline.record import StepRecord
from gangline_health.config import NumbersOptions
from gangline_health.monitors.numbers import ROUTINE, SEVERAL, NumbersMonitor
from gangline_testkit.health import make_healthy


def series(losses, norms=None) -> list[StepRecord]:
    found = []
    for step, loss in enumerate(losses, 1):
        record = make_healthy(1)[0]
        record.step, record.loss, record.grad_norm = (
            step,
            float(loss),
            float(norms[step - 1] if norms is not None else 1),
        )
        record.finite = math.isfinite(loss)
        found.append(record)
    return found


def found(records: list[StepRecord], monitor: NumbersMonitor | None = None) -> list[tuple[int, str, int]]:
    """Return (step, kind, number in a row) of each verdict, with calls of the monitor as in a run."""
    monitor, said = monitor or NumbersMonitor(NumbersOptions()), []
    for record in records:
        verdicts = list(monitor.before_update(record.step, record.loss, record.grad_norm)) if record.finite else []
        verdicts += monitor.observe(record)
        said += [(record.step, verdict.kind, verdict.details["row"]) for verdict in verdicts]
    return said


def noise(steps: int, tail: float = 5.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(tail, steps)


def test_heavy_tailed_noise_gives_no_false_alarm() -> None:
    """Check Student's t noise with 8 degrees of freedom on the loss, and gradient norms whose logarithm drifts."""
    steps = 10_000
    falling = 2 + 4 * np.exp(-np.arange(steps) / 300) + 0.03 * noise(steps, 8.0)
    wander = np.cumsum(noise(steps, seed=2)) * 0.005
    assert found(series(falling, np.exp(wander + 0.15 * noise(steps, 30.0, seed=1)))) == []


def test_rare_high_loss_batches_give_no_false_alarm() -> None:
    """Check losses as of a nearly memorized small corpus, whose median does not describe the remaining loss."""
    draw = np.random.default_rng(3)
    usual = 0.03 * (1 + 0.3 * np.abs(noise(5000, 8.0)))
    rare = np.where(draw.random(5000) < 1 / 15, draw.uniform(0.3, 0.6, 5000), 0.0)
    assert found(series(usual + rare, np.ones(5000))) == []
    spoilt = usual + rare
    spoilt[3000:3003] += 3.0
    assert found(series(spoilt, np.ones(5000))) == [(3000 + n, "loss-spike", n) for n in (1, 2, 3)]


def test_recurring_loss_spikes_are_soon_not_reported() -> None:
    draw = np.random.default_rng(4)
    usual = 0.03 * (1 + 0.3 * np.abs(noise(5000, 8.0)))
    rare = np.where(draw.random(5000) < 1 / 15, draw.uniform(0.3, 0.6, 5000), 0.0)
    rare[:200] = 0.0
    said = found(series(usual + rare, np.ones(5000)))
    assert [row for *_, row in said] == [1] * len(said), "no playbook goes back for it"
    assert len(said) <= SEVERAL + 2
    assert said[-1][0] < 400


def test_skipped_spike_does_not_hide_later_spikes() -> None:
    losses = 3 + 0.05 * noise(500, 30.0)
    norms = np.exp(0.1 * noise(500, 30.0, seed=1))
    for step, more in ((301, 6.0), (341, 6.0), (381, 9.0)):
        losses[step - 1] += more
        norms[step + 9] *= 20.0 * more
    spikes = found(series(losses, norms))
    assert [step for step, kind, _ in spikes if kind == "loss-spike"] == [301, 341, 381]
    assert [step for step, kind, _ in spikes if kind == "gradient-spike"] == [311, 351, 391]


def test_loss_spike_history_survives_restart() -> None:
    losses = 3 + 0.05 * noise(500, 30.0)
    losses[[300, 320, 340, 360, 380, 400]] += 6.0
    records, before = series(losses), NumbersMonitor(NumbersOptions())
    first = found(records[:350], before)
    after = NumbersMonitor(NumbersOptions())
    after.load_state(json.loads(json.dumps(before.state())))
    assert first + found(records[350:], after) == found(records)
    assert [step for step, _, _ in found(records)] == [301, 321, 341, 361], "the fifth of one window is usual"


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_spike_limit_scales_with_noise(scale: float) -> None:
    losses = scale * (3 + 0.05 * noise(200, 30.0))
    losses[150] += scale * 0.3  # 6 standard deviations
    losses[170] += scale * 0.8  # 16 standard deviations
    assert found(series(losses)) == [(171, "loss-spike", 1)]


def test_doubled_gradient_norm_is_not_a_spike() -> None:
    norms = np.exp(0.02 * noise(200, 30.0, seed=1))
    norms[100], norms[150] = 2.0, 10.0
    assert found(series(3 + 0.05 * noise(200, 30.0), norms)) == [(151, "gradient-spike", 1)]


def test_consecutive_spikes_do_not_widen_the_limit() -> None:
    losses = 3 + 0.05 * noise(200, 30.0)
    losses[150:160] += 5
    assert found(series(losses)) == [(151 + n, "loss-spike", 1 + n) for n in range(10)]


def test_slowly_rising_loss_is_divergence() -> None:
    losses = 3 + 0.05 * noise(400, 30.0)
    losses[150:] += 0.005 * np.arange(250)
    said = found(series(losses))
    assert {kind for _, kind, _ in said} == {"divergence"}
    assert 150 < said[0][0] < 280


def test_zero_gradients_are_reported_once() -> None:
    norms = np.ones(60)
    norms[20:50] = 0
    assert found(series(3 + 0.05 * noise(60, 30.0), norms)) == [(30, "zero-gradients", 10)]


def test_overflows_of_loss_scale_search_are_not_reported() -> None:
    losses = [math.nan] * (ROUTINE + 2)
    scaled = found(series(losses), NumbersMonitor(NumbersOptions(), scaled=True))
    assert scaled == [(ROUTINE + 1, "not-finite", ROUTINE + 1), (ROUTINE + 2, "not-finite", ROUTINE + 2)]
    assert len(found(series(losses))) == ROUTINE + 2


def test_zero_losses_set_no_baseline() -> None:
    """Check losses as of batches without valid tokens."""
    assert found(series([0.0] * 100)) == []
    later = 3 + 0.05 * noise(100, 30.0)
    assert found(series([0.0] * 100 + list(later)))[0][0] > 100
    assert "divergence" not in {kind for _, kind, _ in found(series([0.0] * 100 + list(later)))}


def test_rare_text_in_small_batch_is_not_spike() -> None:
    """Check a batch of 64 tokens of memorized text with one unpredictable number, as occurs in a healthy run."""
    losses = 0.04 + 0.01 * np.abs(noise(200))
    losses[150] = 0.62
    assert found(series(losses), NumbersMonitor(NumbersOptions(), tokens=64)) == []
    large = found(series(losses), NumbersMonitor(NumbersOptions(), tokens=64_000))
    assert large == [(151, "loss-spike", 1)], "there the same rise is a thousand sentences"
