"""How often to save, and what failures cost."""

from __future__ import annotations

import pytest

from gangline.cluster import losses


def test_youngs_interval_and_shares_that_add_up():
    found = losses(stall=10, between_failures=20_000, restart=300)
    assert found.interval == pytest.approx((2 * 10 * 20_000) ** 0.5)
    assert found.progress + found.stall + found.redone + found.restart == pytest.approx(1)
    assert found.redone == pytest.approx((found.interval + 10) / 2 / 20_000)


def test_no_other_interval_makes_more_progress():
    best = losses(stall=10, between_failures=20_000, restart=300)

    def progress(interval: float) -> float:
        return (1 - ((interval + 10) / 2 + 300) / 20_000) * interval / (interval + 10)

    assert progress(best.interval) == pytest.approx(best.progress)
    assert best.progress > max(progress(best.interval * 0.8), progress(best.interval * 1.3))


@pytest.mark.parametrize("wrong", [{"stall": 0}, {"between_failures": 0}, {"restart": -1}, {"between_failures": 200}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=r"longer than nothing|done again"):
        losses(**{"stall": 10, "between_failures": 20_000, "restart": 300, **wrong})
