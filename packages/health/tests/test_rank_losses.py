"""`health.monitors.rank_losses`: ranks whose loss deviates from that of the other ranks.

The ranks see different samples.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gangline.health import Action, Verdict
from gangline.record import StepRecord, read_records
from gangline.run.events import read_events
from gangline.train.rank import train
from gangline_health.config import RankLossesOptions
from gangline_health.monitors.rank_losses import RankLossesMonitor
from gangline_testkit.health import make_healthy
from gangline_testkit.pool import get_pool
from gangline_testkit.sessions import open_session

RANKS = 8


def records(steps: int, seed: int = 0, ranks: int = RANKS, tail: bool = False) -> Iterator[StepRecord]:
    """Yield records of a falling loss with rank noise. tail: one loss in ten is much higher, as in a data mixture."""
    draw = random.Random(seed)
    for record in make_healthy(steps, seed):
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
def test_deviating_rank_is_named_with_first_step(by: float) -> None:
    (verdict,) = told(changed(records(600), 5, by, since=300))
    assert (verdict.kind, verdict.where, verdict.suggestion) == ("rank-loss", "rank 5", Action.WARN)
    assert verdict.details["exclude"] == "rank 5"
    assert 330 <= verdict.details["step"] <= 365
    assert verdict.details["first"] <= 302, "a return must reach behind the first bad step"
    assert ("above" if by > 0 else "below") in verdict.evidence


def test_single_extreme_batch_gives_a_note() -> None:
    (verdict,) = told(changed(records(300), 2, 6.0, since=200, until=200))
    assert (verdict.kind, verdict.where, verdict.suggestion) == ("rank-loss-spike", "rank 2", Action.NOTE)
    assert verdict.details["step"] == 200


@pytest.mark.parametrize("tail", [False, True], ids=["normal", "mixture"])
@pytest.mark.parametrize("ranks", [3, 4, 16])
def test_random_rank_differences_are_not_reported(ranks: int, tail: bool) -> None:
    assert told(records(3000, seed=ranks, ranks=ranks, tail=tail)) == []


def test_few_ranks_or_no_losses_are_not_judged() -> None:
    assert told(changed(records(300, ranks=2), 1, 5.0, since=1)) == []
    assert told(replace(record, rank_losses=None) for record in records(300)) == []
    assert told(replace(record, rank_losses=[1.0, 2.0, 3.0, math.nan]) for record in records(300)) == []


def test_ranks_without_own_loss_are_ignored() -> None:
    """Check ranks without a loss, such as those of the first stages of a pipeline."""
    silent = (
        replace(record, rank_losses=[None] * 4 + list(record.rank_losses or ())) for record in records(400, ranks=4)
    )
    (verdict,) = told(changed(silent, 6, 0.5, since=200))
    assert verdict.where == "rank 6"


def test_verdict_repeats_only_while_deviation_lasts() -> None:
    steps = [
        verdict.details["step"] for verdict in told(changed(records(1500), 1, 1.0, 100, until=900), report_every=300)
    ]
    assert len(steps) == 3
    assert all(299 < later - earlier < 302 for earlier, later in pairwise(steps))


# --- real ranks ------------------------------------------------------------------------------------------------------

# Ranks differ a little on a falling loss, so only lasting deviations count. Monitors that find such faults too are off.
REAL = (
    "health=[monitors]", "parallel=ddp", "run.steps=96", "checkpoint=off", "batch.global_size=16", "precision=fp32",
    "batch.sequence_length=32", "optimizer.learning_rate=0.01", "health.monitors.numbers.on=false",
    "health.monitors.corruption.on=false", "health.monitors.rank_losses.window=32",
)  # fmt: skip
SINCE = 48


def with_a_fault(run_dir: Path, bad: int | None, what: str) -> int:
    """Train and return the exit code. Rank `bad` reads noise instead of text, or negates weights of the head."""
    s = open_session(run_dir, *REAL)
    take, applied = s.batches.take, s.runtime.finish_update
    draw = torch.Generator().manual_seed(0)

    def reads(cursor: int, step: int, size: int | None = None):
        def noise(like: torch.Tensor) -> torch.Tensor:
            return torch.randint(256, like.shape, generator=draw)

        found = take(cursor, step, size)
        return [replace(each, tokens=noise(each.tokens), targets=noise(each.targets)) for each in found]

    def turns() -> None:
        applied()
        if s.step == SINCE:
            head = [shard.local for shard in s.runtime.shards() if shard.name.startswith("model/head")]
            max(head, key=torch.Tensor.numel).neg_()

    if s.comms.rank == bad and what == "data":
        s.batches.take = reads  # type: ignore[method-assign]
    if s.comms.rank == bad and what == "weights":
        s.runtime.finish_update = turns  # type: ignore[method-assign]
    return train(s)


@pytest.mark.parametrize("what", ["data", pytest.param("weights", marks=pytest.mark.nightly)])
def test_faulty_rank_of_four_is_named(tmp_path: Path, what: str) -> None:
    assert get_pool(4).run(with_a_fault, tmp_path / "out", 2, what) == [0] * 4
    found = [line for line in read_events(tmp_path / "out") if line.get("kind") == "rank-loss"]
    assert {line["where"] for line in found} == {"rank 2"}
    assert {line["details"]["rank"] for line in found} == {2}
    assert "above the median rank in most of" in found[0]["evidence"]
    if what == "weights":
        assert found[0]["details"]["step"] > SINCE, "not before there was anything to be found"
    last = [record["rank_losses"] for record in read_records(tmp_path / "out" / "metrics.jsonl")[-16:]]
    sums = [sum(losses) for losses in zip(*last, strict=True)]
    assert sums.index(max(sums)) == 2


@pytest.mark.nightly
def test_four_healthy_ranks_give_no_verdict(tmp_path: Path) -> None:
    assert get_pool(4).run(with_a_fault, tmp_path / "out", None, "") == [0] * 4
    assert not [line for line in read_events(tmp_path / "out") if line.get("kind") == "rank-loss"]
    assert len(read_records(tmp_path / "out" / "metrics.jsonl")[-1]["rank_losses"]) == 4
