"""Ranks whose own loss is not like that of the others, though all see different samples."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from gangline.health import Action, Verdict
from gangline.testing.health import healthy
from gangline.track import StepRecord
from gangline_health.config import RankLossesOptions
from gangline_health.monitors.rank_losses import RankLossesMonitor

RANKS = 8


def records(steps: int, seed: int = 0, ranks: int = RANKS, tail: bool = False) -> Iterator[StepRecord]:
    """A falling loss; ranks differ by chance, with a `tail` as of a mixture: one in ten reads something much harder."""
    draw = random.Random(seed)
    for record in healthy(steps, seed):
        hard = [draw.random() < 0.1 if tail else False for _ in range(ranks)]
        losses: list[float | None] = [record.loss + draw.gauss(1.5 if one else 0.0, 0.1) for one in hard]
        yield replace(record, rank_losses=losses, tokens=ranks * 4096)


def changed(found: Iterator[StepRecord], rank: int, by: float, since: int, until: float = math.inf):
    for record in found:
        losses = list(record.rank_losses or ())
        if since <= record.step <= until:
            losses[rank] = (losses[rank] or 0.0) + by
        yield replace(record, rank_losses=losses)


def told(found: Iterator[StepRecord], **options) -> list[Verdict]:
    monitor = RankLossesMonitor(RankLossesOptions(**options))
    return [verdict for record in found for verdict in monitor.observe(record)]


@pytest.mark.parametrize("by", [0.4, -0.4], ids=["above", "below"])
def test_a_rank_that_stays_apart_is_named_with_the_step_it_began(by: float) -> None:
    (verdict,) = told(changed(records(600), 5, by, since=300))
    assert (verdict.kind, verdict.where, verdict.suggestion) == ("rank-loss", "rank 5", Action.WARN)
    assert verdict.details["exclude"] == "rank 5"
    assert 330 <= verdict.details["step"] <= 365
    assert verdict.details["first"] <= 302, "a return must reach behind the first bad step"
    assert ("above" if by > 0 else "below") in verdict.evidence


def test_one_batch_far_beyond_all_others_is_a_note() -> None:
    (verdict,) = told(changed(records(300), 2, 6.0, since=200, until=200))
    assert (verdict.kind, verdict.where, verdict.suggestion) == ("rank-loss-spike", "rank 2", Action.NOTE)
    assert verdict.details["step"] == 200


@pytest.mark.parametrize("tail", [False, True], ids=["normal", "mixture"])
@pytest.mark.parametrize("ranks", [3, 4, 16])
def test_ranks_that_differ_by_chance_are_nobodys_concern(ranks: int, tail: bool) -> None:
    assert told(records(3000, seed=ranks, ranks=ranks, tail=tail)) == []


def test_few_ranks_or_no_losses_are_not_judged() -> None:
    assert told(changed(records(300, ranks=2), 1, 5.0, since=1)) == []
    assert told(replace(record, rank_losses=None) for record in records(300)) == []
    assert told(replace(record, rank_losses=[1.0, 2.0, 3.0, math.nan]) for record in records(300)) == []


def test_ranks_whose_loss_another_one_computes_are_left_out() -> None:
    """As the first stages of a pipeline."""
    silent = (
        replace(record, rank_losses=[None] * 4 + list(record.rank_losses or ())) for record in records(400, ranks=4)
    )
    (verdict,) = told(changed(silent, 6, 0.5, since=200))
    assert verdict.where == "rank 6"


def test_it_is_told_again_after_a_while_and_not_once_it_is_over() -> None:
    steps = [verdict.details["step"] for verdict in told(changed(records(1500), 1, 1.0, 100, until=900), again=300)]
    assert len(steps) == 3
    assert all(299 < later - earlier < 302 for earlier, later in pairwise(steps))
