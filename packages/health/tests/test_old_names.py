"""Former names of options of `health=monitors`, which are refused with the present name."""

from __future__ import annotations

import pytest

from gangline import UserError
from gangline_testkit.runs import build_small_run


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("budget.orders", "budget.responses"),
        ("rank_losses.lasting", "rank_losses.sustained_score"),
        ("rank_losses.spike", "rank_losses.spike_score"),
        ("rank_losses.again", "rank_losses.report_every"),
        ("stragglers.slower", "stragglers.min_ratio"),
        ("stragglers.score", "stragglers.min_score"),
        ("stragglers.least_seconds", "stragglers.min_seconds"),
        ("stragglers.again", "stragglers.report_every"),
        ("stragglers.steadily", "stragglers.steady_ratio"),
    ],
)
def test_old_option_name_suggests_the_new_name(old: str, new: str) -> None:
    with pytest.raises(UserError) as error:
        build_small_run("health=[monitors]", f"health.monitors.{old}=5")
    assert f"Did you mean health.monitors.{new}?" in str(error.value)
