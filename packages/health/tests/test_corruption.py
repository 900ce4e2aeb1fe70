"""A flipped bit in one replica: found, named, and undone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch

from gangline.comm import Comm
from gangline.launch.failures import RestartWanted
from gangline.launch.nodes import name_of_this_node
from gangline.testing.health_ranks import lived
from gangline.testing.pool import pool
from gangline.testing.sessions import session
from gangline.tools import attempts, read_records
from gangline.train.rank import train
from gangline_health.config import CorruptionOptions
from gangline_health.monitors.corruption import CorruptionMonitor, fingerprint, odd_ones, words

WORDS = ("health=[on]", "health.on.corruption.every=2", "parallel=ddp", "run.steps=8", "checkpoint.every=2")


def run(run_dir: Path, bad: int | None, *settings: str) -> tuple[int | str, list[attempts.Attempt]]:
    """A run of which one rank's weight has another bit after its fifth step."""
    s = session(run_dir, *WORDS, *settings)
    applied = s.runtime.applied

    def flips() -> None:
        applied()
        if s.comms.rank == bad and s.step == 4 and s.attempt == 1:
            words(next(iter(s.runtime.shards())).local)[3] ^= 1 << 20

    s.runtime.applied = flips  # type: ignore[method-assign]
    try:
        code: int | str = train(s)
    except RestartWanted:
        code = "restart"
    return code, [line for line in s.history if line.order]


def losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in read_records(run_dir / "metrics.jsonl")]


def test_the_odd_one_of_four_is_named_and_the_run_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    for code, (order,) in pool(4).run(run, tmp_path / "bad", 2):
        assert code == 0
        assert (order.order, order.kinds, order.start, order.skipped) == (
            "roll_back",
            ("corruption",),
            "step-00000004",
            0,
        )
        assert "the weights of rank 2 are those of 1 of 4 replicas" in order.why
    assert pool(4).run(run, tmp_path / "good", None) == [(0, [])] * 4
    assert losses(tmp_path / "bad") == losses(tmp_path / "good")


def test_an_exclusion_names_the_machine_as_the_launcher_does_and_starts_from_before_the_flip(tmp_path: Path) -> None:
    """Also where a newer checkpoint holds the flipped bit: those who read it would all agree."""
    words = ("health.on.playbooks.corruption.actions=[exclude]", "health.on.corruption.every=4", "checkpoint.every=1")
    for code, (order,) in pool(4).run(run, tmp_path / "out", 2, *words):
        assert code == "restart"
        assert (order.order, order.start, order.skipped) == ("restart", "step-00000004", 0)
        assert order.exclude == (name_of_this_node(),)


def test_of_two_replicas_none_is_excluded_and_the_run_does_not_go_on(tmp_path: Path) -> None:
    words = ("health.on.playbooks.corruption.actions=[exclude]", "checkpoint.every=3")
    for code, orders in pool(2).run(run, tmp_path / "out", 1, *words):
        assert code == 0
        assert [(order.order, order.start) for order in orders] == [("roll_back", "step-00000003")]


def test_turned_on_in_the_middle_of_a_run_it_trusts_where_it_began() -> None:
    monitor = CorruptionMonitor(CorruptionOptions())
    monitor.load_state({})
    monitor.collective(cast(Comm, SimpleNamespace(size=1)), 501)
    assert monitor.state() == {"agreed": 500}
    monitor.load_state({"agreed": 400})
    monitor.collective(cast(Comm, SimpleNamespace(size=1)), 451)
    assert monitor.state() == {"agreed": 400}


def test_replicas_that_are_all_compared_are_no_news(tmp_path: Path) -> None:
    (notes, _), _ = pool(2).run(lived, tmp_path / "out", "health=[on]", "parallel=ddp", "run.steps=2")
    assert not any("not-compared" in note for note in notes)


def test_of_two_it_is_known_that_they_differ() -> None:
    assert odd_ones([(7, 1, 1), (7, 2, 1)]) == {0: (2, 1), 1: (2, 1)}
    assert odd_ones([(7, 1, 1), (8, 2, 1)]) == {}
    assert odd_ones([(7, 1, 1), (7, 1, 1), (7, 1, 2)]) == {2: (3, 1)}
    assert odd_ones([(7, 1, 1), (7, 1, 1), (7, 5, 2), (7, 5, 2)]) == {0: (4, 2), 1: (4, 2), 2: (4, 2), 3: (4, 2)}


def test_any_bit_of_any_element_and_any_swap_is_seen(tmp_path: Path) -> None:
    s = session(tmp_path / "out", "parallel=single")
    before = fingerprint(s.runtime)
    generator = torch.Generator().manual_seed(0)
    shards = list(s.runtime.shards())
    for _ in range(64):
        shard = shards[int(torch.randint(len(shards), (), generator=generator))]
        bits = words(shard.local)
        at = int(torch.randint(bits.numel(), (), generator=generator))
        bit = int(torch.randint(8 * shard.local.element_size() - 1, (), generator=generator))
        bits[at] ^= 1 << bit
        assert fingerprint(s.runtime) != before
        bits[at] ^= 1 << bit
    for sign in (words(shard.local) for shard in shards[:4]):
        sign[0] ^= -(1 << 63)
        assert fingerprint(s.runtime) != before
        sign[0] ^= -(1 << 63)
    bits = next(words(shard.local) for shard in shards if float(shard.local.std()) > 0)
    bits[[0, 1]] = bits[[1, 0]]
    assert fingerprint(s.runtime) != before
    bits[[0, 1]] = bits[[1, 0]]
    assert fingerprint(s.runtime) == before
