"""`health.monitors.corruption`: a flipped bit in one replica is detected, located and undone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gangline import UserError
from gangline.comm.base import Comm
from gangline.config.check import check
from gangline.launch.errors import RestartWanted
from gangline.launch.network import name_of_this_node
from gangline.record import read_records
from gangline.run import attempts
from gangline.run.events import read_events
from gangline.shard import Shard
from gangline.train.rank import train
from gangline_basics.checkpoint.torch_dcp import DcpCheckpointer
from gangline_health.config import CorruptionOptions
from gangline_health.monitors.bits import compute_fingerprint, list_weights, sum_arrays, view_words
from gangline_health.monitors.corruption import CorruptionMonitor, find_odd_ranks
from gangline_health.monitors.recompute import COMPUTED, RECEIVED, SAME, Event, find_first_difference
from gangline_testkit import as_installed
from gangline_testkit.health import make_healthy
from gangline_testkit.health_ranks import run_training
from gangline_testkit.pool import get_pool
from gangline_testkit.real_runs import RealRuns
from gangline_testkit.runs import build_small_run
from gangline_testkit.sessions import open_session

WORDS = ("health=[monitors]", "health.monitors.corruption.every=2", "parallel=ddp", "run.steps=8", "checkpoint.every=2")


def run(run_dir: Path, bad: int | None, *settings: str) -> tuple[int | str, list[attempts.Attempt]]:
    """Train and return (exit code or "restart", actions). bad: rank with a flipped bit of a weight after step 5."""
    s = open_session(run_dir, *WORDS, *settings)
    applied = s.runtime.finish_update

    def flips() -> None:
        applied()
        if s.comms.rank == bad and s.step == 4 and s.attempt == 1:
            view_words(next(iter(s.runtime.shards())).local)[3] ^= 1 << 20

    s.runtime.finish_update = flips  # type: ignore[method-assign]
    try:
        code: int | str = train(s)
    except RestartWanted:
        code = "restart"
    return code, [line for line in s.history if line.action]


def losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in read_records(run_dir / "metrics.jsonl")]


def test_corrupt_replica_of_four_triggers_rollback(tmp_path: Path) -> None:
    for code, (line,) in get_pool(4).run(run, tmp_path / "bad", 2):
        assert code == 0
        assert (line.action, line.kinds, line.start, line.skipped) == (
            "roll_back",
            ("corruption",),
            "step-00000004",
            0,
        )
        assert "silent data corruption: the weights of rank 2 differ from 3 of its 3 other replicas" in line.why
    assert get_pool(4).run(run, tmp_path / "good", None) == [(0, [])] * 4
    assert losses(tmp_path / "bad") == losses(tmp_path / "good")


def test_exclude_action_restarts_before_bit_flip_without_node(tmp_path: Path) -> None:
    """Check that newer checkpoints, which hold the flipped bit, are skipped: all ranks would load the bit and agree."""
    words = (
        "health.monitors.playbooks.corruption.actions=[exclude]",
        "health.monitors.corruption.every=4",
        "checkpoint.every=1",
    )
    for code, (line,) in get_pool(4).run(run, tmp_path / "out", 2, *words):
        assert code == "restart"
        assert (line.action, line.start, line.skipped) == ("restart", "step-00000004", 0)
        assert line.exclude == (name_of_this_node(),)


def test_corruption_in_two_replicas_rolls_back_without_exclusion(tmp_path: Path) -> None:
    words = ("health.monitors.playbooks.corruption.actions=[exclude]", "checkpoint.every=3")
    for code, lines in get_pool(2).run(run, tmp_path / "out", 1, *words):
        assert code == 0
        assert [(line.action, line.start) for line in lines] == [("roll_back", "step-00000003")]


def test_corruption_monitor_enabled_mid_run_trusts_earlier_steps() -> None:
    monitor = CorruptionMonitor(CorruptionOptions())
    monitor.load_state({})
    monitor.collective(cast(Comm, SimpleNamespace(size=1)), 501)
    assert monitor.state() == {"agreed": 500}
    monitor.load_state({"agreed": 400})
    monitor.collective(cast(Comm, SimpleNamespace(size=1)), 451)
    assert monitor.state() == {"agreed": 400}


def test_fully_compared_replicas_give_no_note(tmp_path: Path) -> None:
    (notes, _), _ = get_pool(2).run(run_training, tmp_path / "out", "health=[monitors]", "parallel=ddp", "run.steps=2")
    assert not any("not-compared" in note for note in notes)


def with_a_gradient_flipped(run_dir: Path, bad: int | None, *settings: str) -> tuple[int, list[attempts.Attempt]]:
    """Train and return (exit code, actions). bad: rank with a flipped gradient bit in step 5, after the reduction."""
    s = open_session(run_dir, *WORDS, *settings)
    once = s.runtime.step

    def step(microbatches):
        found = once(microbatches)
        if s.comms.rank == bad and s.step == 4 and s.attempt == 1:
            piece = next(piece for each in s.runtime.parameters() for piece in each.pieces)
            view_words(piece.tensor.grad)[3] ^= 1 << 20
        return found

    s.runtime.step = step  # type: ignore[method-assign]
    return train(s), [line for line in s.history if line.action]


def test_corrupt_gradient_names_its_rank(tmp_path: Path) -> None:
    every = "health.monitors.corruption.every=1"
    for code, (line,) in get_pool(4).run(with_a_gradient_flipped, tmp_path / "bad", 1, every):
        assert (code, line.action, line.start) == (0, "roll_back", "step-00000004")
        assert "silent data corruption: the gradients of rank 1 differ from 3 of its 3 other replicas" in line.why
    assert get_pool(4).run(with_a_gradient_flipped, tmp_path / "good", None, every) == [(0, [])] * 4
    assert losses(tmp_path / "bad") == losses(tmp_path / "good")


def reads(run_dir: Path, bad: bool, steps: int, *layout: str) -> tuple[int, list[attempts.Attempt]]:
    """Train and return (exit code, actions). bad: whether to flip a bit of a weight read from checkpoint 4."""
    load = DcpCheckpointer.load

    def damages(self, id, shards, registry):
        load(self, id, shards, registry)
        if str(id) == "step-00000004":
            for shard in shards:
                if shard.name.startswith("model/") and shard.offset == (0,) * len(shard.offset):
                    view_words(shard.local)[0] ^= 1 << 20
                    return

    DcpCheckpointer.load = damages if bad else load  # type: ignore[method-assign]
    try:
        s = open_session(run_dir, "health=[monitors]", "checkpoint.every=2", *layout, f"run.steps={steps}")
        code = train(s)
    finally:
        DcpCheckpointer.load = load  # type: ignore[method-assign]
    return code, [line for line in s.history if line.action]


def test_corrupt_checkpoint_read_is_detected(tmp_path: Path) -> None:
    """Check a checkpoint that two ranks saved and one rank reads: the check does not depend on the layout."""
    for name in ("bad", "good"):
        assert get_pool(2).run(reads, tmp_path / name, False, 4, "parallel=ddp") == [(0, [])] * 2
    assert reads(tmp_path / "good", False, 6, "parallel=single") == (0, [])
    code, (line,) = reads(tmp_path / "bad", True, 6, "parallel=single")
    assert (code, line.action, line.start) == (0, "roll_back", "step-00000002")
    assert "weights read from the checkpoint of step 4 differ from the saved weights: model/" in line.why


def test_replicas_meant_to_differ_are_not_compared(tmp_path: Path) -> None:
    """Check local SGD: replicas differ from the first step on, and average their weights in the fourth step."""
    with as_installed("gangline-toys", "gangline_testkit.toys.plugin"):
        answers = get_pool(2).run(watched_apart, tmp_path / "run")
    assert [code for code, _ in answers] == [0, 0]
    assert "not-compared" in answers[0][1]
    assert "corruption" not in answers[0][1]


def watched_apart(run_dir: Path) -> tuple[int, list[str]]:
    """Train with `parallel=apart`; return the exit code and the kinds of verdicts."""
    words = (
        "parallel=apart",
        "batch.global_size=4",
        "health=[monitors]",
        "health.monitors.corruption.every=1",
        "run.steps=6",
    )
    with as_installed("gangline-toys", "gangline_testkit.toys.plugin"):
        code = train(open_session(run_dir, *words))
    verdicts = [line for line in read_events(run_dir) if line["event"] == "verdict"]
    return code, [line["kind"] for line in verdicts]


def test_array_checksum_is_independent_of_sharding() -> None:
    whole = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))

    def total(*boxes: tuple[slice, ...]) -> int:
        shards = [
            Shard("model/w", (6, 5, 4), torch.float32, tuple(s.start or 0 for s in box), whole[box].clone(), True)
            for box in boxes
        ]
        runtime = SimpleNamespace(registry=["model/w"], shards=lambda: shards)
        return int(sum_arrays(cast(Any, runtime), torch.device("cpu"))[1])

    every = slice(None)
    uncut = total((every, every, every))
    assert total((slice(0, 2), every, every), (slice(2, 6), every, every)) == uncut
    top, left, right = slice(0, 3), slice(0, 1), slice(1, 4)
    assert total((every, top, left), (every, top, right), (every, slice(3, 5), every)) == uncut
    whole[0, 0, 0], whole[5, 4, 3] = whole[5, 4, 3].clone(), whole[0, 0, 0].clone()
    assert total((every, every, every)) != uncut


def test_miscomputing_rank_is_found_without_replicas(tmp_path: Path) -> None:
    """Check a fault after which all ranks receive the same wrong sum, so their weights and gradients agree."""
    words = ("parallel=ddp", "launch.processes=2", "run.steps=12", "checkpoint.every=3", "run.deterministic=on")
    twice = ("health.monitors.corruption.recompute_every=3", "health.monitors.corruption.every=1")
    with RealRuns(tmp_path) as runs:
        runs.train("run.dir=calm", *words)
        runs.train("run.dir=wild", *words, "health=[monitors,chaos]", "health.chaos.at=[miscompute@6:1]", *twice)
        assert runs.read_curve("wild") == runs.read_curve("calm")
        found = [line for line in read_events(tmp_path / "wild") if line.get("kind") == "corruption"]
    (verdict,) = [line for line in found if line["event"] == "verdict"]
    assert (verdict["where"], verdict["details"]["exclude"], verdict["step"]) == ("rank 1", "rank 1", 6)
    assert "step 6 was computed twice" in verdict["evidence"]
    assert "first in all_reduce along" in verdict["evidence"]


def test_bad_restore_by_chaos_is_detected(tmp_path: Path) -> None:
    words = ("parallel=ddp", "launch.processes=2", "run.steps=4", "checkpoint.every=2", "health=[monitors]")
    with RealRuns(tmp_path) as runs:
        runs.train("run.dir=out", *words)
        runs.train("resume=out", "run.steps=8", "health=[monitors,chaos]", "health.chaos.at=[bad-restore@1:0]")
        found = [line for line in read_events(tmp_path / "out") if line.get("kind") == "corruption"]
    said = {line["where"]: line["evidence"] for line in found if line["event"] == "verdict"}
    assert "checkpoint of step 4" in said["the checkpoint"]
    assert "the weights of rank 0" in said["rank 0"]


def test_recompute_check_requires_deterministic_mode() -> None:
    every = "health.monitors.corruption.recompute_every=5"
    words = ("model.vocab_size=256", "run.deterministic=false", "health=[monitors]", every)
    with pytest.raises(UserError, match=r"run.deterministic=on, or health.monitors.corruption.recompute_every=null"):
        check(build_small_run(*words))


def test_first_difference_is_classified_as_computed_or_received() -> None:
    def events(*numbers: int) -> list[Event]:
        return [Event(f"all_reduce {n}", n % 2 == 0, torch.tensor([each])) for n, each in enumerate(numbers)]

    assert find_first_difference(events(1, 2, 3), events(1, 2, 3)) == (SAME, "")
    assert find_first_difference(events(1, 2, 3), events(9, 8, 7)) == (COMPUTED, "all_reduce 0")
    assert find_first_difference(events(1, 2, 3), events(1, 8, 7)) == (RECEIVED, "all_reduce 1")
    assert find_first_difference(events(1, 2, 3), events(1, 2))[0] == COMPUTED


def test_find_odd_ranks_needs_a_majority() -> None:
    assert find_odd_ranks([(7, 1, 1), (7, 2, 1)]) == {0: (2, 1, False), 1: (2, 1, False)}
    assert find_odd_ranks([(7, 1, 1), (8, 2, 1)]) == {}
    assert find_odd_ranks([(7, 1, 1), (7, 1, 1), (7, 1, 2)]) == {2: (3, 1, True)}
    assert find_odd_ranks([(7, 1, 1), (7, 1, 1), (7, 5, 2), (7, 5, 2)]) == dict.fromkeys(range(4), (4, 2, False))


@pytest.mark.parametrize("sums", [(1, 2, 3), (1, 1, 2, 3), (1, 1, 2, 2)])
def test_corruption_without_majority_excludes_no_rank(sums: tuple[int, ...]) -> None:
    monitor = CorruptionMonitor(CorruptionOptions())
    monitor.odd = {rank: {"weights": odd} for rank, odd in find_odd_ranks([(7, each, each) for each in sums]).items()}
    found = list(monitor.observe(next(iter(make_healthy(1)))))
    assert [verdict.where for verdict in found] == [f"rank {rank}" for rank in range(len(sums))]
    assert all("exclude" not in verdict.details and verdict.confidence < 1 for verdict in found)
    assert all("no majority" in verdict.evidence for verdict in found)


def test_outvoted_ranks_are_excluded() -> None:
    monitor = CorruptionMonitor(CorruptionOptions())
    rows = [(7, each) for each in (1, 1, 1, 2, 2)]
    monitor.odd = {rank: {"weights": odd} for rank, odd in find_odd_ranks(rows).items()}
    found = list(monitor.observe(next(iter(make_healthy(1)))))
    assert [verdict.details["exclude"] for verdict in found] == ["rank 3", "rank 4"]


def test_fingerprint_detects_any_bit_flip_and_swap(tmp_path: Path) -> None:
    s = open_session(tmp_path / "out", "parallel=single")
    before = compute_fingerprint(list_weights(s.runtime))
    generator = torch.Generator().manual_seed(0)
    shards = list(s.runtime.shards())
    for _ in range(64):
        shard = shards[int(torch.randint(len(shards), (), generator=generator))]
        bits = view_words(shard.local)
        at = int(torch.randint(bits.numel(), (), generator=generator))
        bit = int(torch.randint(8 * shard.local.element_size() - 1, (), generator=generator))
        bits[at] ^= 1 << bit
        assert compute_fingerprint(list_weights(s.runtime)) != before
        bits[at] ^= 1 << bit
    for sign in (view_words(shard.local) for shard in shards[:4]):
        sign[0] ^= -(1 << 63)
        assert compute_fingerprint(list_weights(s.runtime)) != before
        sign[0] ^= -(1 << 63)
    bits = next(view_words(shard.local) for shard in shards if float(shard.local.std()) > 0)
    bits[[0, 1]] = bits[[1, 0]]
    assert compute_fingerprint(list_weights(s.runtime)) != before
    bits[[0, 1]] = bits[[1, 0]]
    assert compute_fingerprint(list_weights(s.runtime)) == before
