"""Diagnosis of a hang from the pulses of all ranks: one case for each kind of hang."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from gangline_health.hangs import summary
from gangline_health.hangs.config import HangsOptions
from gangline_health.hangs.diagnose import Watched, diagnose
from gangline_health.hangs.limits import estimate_percentile, get_limit, learn_limits
from gangline_health.hangs.watch import Watcher, lock_watch
from gangline_health.pulses import Collective, Seen

WORLD = (0, 1, 2, 3)


def collective(sequence: int, operation: str = "all_reduce", axis: str = "world", ranks=WORLD, peers=()) -> Collective:
    return Collective(axis, ranks, operation, sequence, 8, float(sequence), 0.0, peers)


def rank(number: int, waits: Collective | None = None, begun: int = 0, still: float = 9.0, **more) -> Watched:
    recent = more.pop("recent", (waits,) if waits else ())
    groups = more.pop("groups", {("world", WORLD): waits.sequence if waits and waits.axis == "world" else begun})
    member = more.pop("member", "")
    phase = "collective" if waits else more.pop("phase", "forward")
    state, alive = more.pop("state", "S"), more.pop("alive", True)
    seen = Seen(number, 4, 0, 100 + number, alive, 2, 7, phase, "backward", 1.0, waits, groups, recent, member=member)
    return Watched(seen, still, 2.0, state)


def test_no_diagnosis_while_no_rank_is_overdue():
    assert diagnose([rank(n, collective(5), still=0.1) for n in WORLD]) is None


def test_diagnosis_names_rank_missing_from_collective():
    found = diagnose([rank(0, collective(5)), rank(1, collective(5)), rank(2, begun=4), rank(3, collective(5))])
    assert found is not None
    assert (found.ranks, found.why, found.operation) == ((2,), "behind", "all_reduce 5 along world")
    assert "ranks 0, 1, 3 wait" in found.evidence


def test_diagnosis_names_health_check_that_never_returns():
    ranks = [rank(n, collective(5)) for n in (0, 1, 3)] + [rank(2, begun=4, phase="between", member="health/mine")]
    found = diagnose(ranks)
    assert found is not None
    assert found.ranks == (2,)
    assert "in between (in code of health=mine) of step 7" in found.evidence


def test_slow_but_progressing_rank_is_not_hung():
    ranks = [rank(0, collective(5)), rank(1, collective(5)), rank(2, begun=4, still=0.3), rank(3, collective(5))]
    assert diagnose(ranks) is None


def test_stopped_rank_in_same_collective_is_named():
    found = diagnose([rank(n, collective(5), state="T" if n == 1 else "S") for n in WORLD])
    assert found is not None
    assert (found.ranks, found.why) == ((1,), "stopped")


def test_rank_in_different_collective_is_diagnosed_as_mismatch():
    ranks = [rank(n, collective(5, "all_gather" if n == 3 else "all_reduce")) for n in WORLD]
    found = diagnose(ranks)
    assert found is not None
    assert (found.ranks, found.why, found.operation) == ((3,), "mismatch", "all_gather 5 along world")


def test_diagnosis_follows_wait_chain_to_blocking_rank():
    """Check that rank 0 waits for rank 1 along tp, and rank 1 for rank 3 along dp, which is stuck in its data phase."""
    left, right = collective(8, axis="tp", ranks=(0, 1)), collective(3, axis="dp", ranks=(1, 3))
    ranks = [
        rank(0, left, groups={("tp", (0, 1)): 8}),
        rank(1, right, groups={("tp", (0, 1)): 7, ("dp", (1, 3)): 3}),
        rank(3, groups={("dp", (1, 3)): 2}, phase="data"),
    ]
    found = diagnose(ranks)
    assert found is not None
    assert (found.ranks, found.operation) == ((3,), "all_reduce 3 along dp")


def test_mutual_wait_on_two_axes_is_a_mismatch():
    left, right = collective(8, axis="tp", ranks=(0, 1)), collective(3, axis="dp", ranks=(0, 1))
    both = {("tp", (0, 1)): 7, ("dp", (0, 1)): 2}
    ranks = [rank(0, left, groups={**both, ("tp", (0, 1)): 8}), rank(1, right, groups={**both, ("dp", (0, 1)): 3})]
    found = diagnose(ranks)
    assert found is not None
    assert found.why == "mismatch"


def test_collective_that_never_ends_is_a_transfer_hang():
    found = diagnose([rank(n, collective(5)) for n in WORLD])
    assert found is not None
    assert (found.ranks, found.why) == (WORLD, "transfer")


def test_dead_rank_is_left_to_the_launcher():
    assert diagnose([rank(0, collective(5)), rank(1, begun=4, alive=False)]) is None


def test_machine_without_report_gives_no_diagnosis():
    assert diagnose([rank(0, collective(5)), rank(1, collective(5))]) is None


def test_diagnosis_across_machines_matches_one_machine(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    here, there = [rank(0, collective(5)), rank(1, collective(5))], [rank(2, begun=4), rank(3, collective(5))]
    summary.tell(tmp_path, "b", there)
    assert summary.read_summaries(tmp_path, "b") == []
    told = summary.read_summaries(tmp_path, "a")
    assert [one.pulse.waits for one in told] == [one.pulse.waits for one in there]
    assert diagnose([*here, *told]) == diagnose([*here, *there])


def test_machines_with_same_hostname_are_watched_separately(tmp_path: Path):
    """Check machines with the same name, as of containers or clones: neither waits for the watcher of the other."""
    (tmp_path / "logs").mkdir()
    here = Watcher(tmp_path, HangsOptions())
    there = Watcher(tmp_path, HangsOptions(), machine="elsewhere")
    assert here.host == there.host
    ours, theirs = [rank(0, collective(5)), rank(1, collective(5))], [rank(2, begun=4), rank(3, collective(5))]
    summary.tell(tmp_path, here.machine, ours)
    summary.tell(tmp_path, there.machine, theirs)
    assert [one.rank for one in summary.read_summaries(tmp_path, here.machine)] == [2, 3]
    assert [one.rank for one in summary.read_summaries(tmp_path, there.machine)] == [0, 1]
    with lock_watch(tmp_path, here.machine), lock_watch(tmp_path, there.machine):
        pass


def test_watch_lock_refuses_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    target = tmp_path / "thesis.txt"
    target.write_text("mine")
    (tmp_path / "logs" / "watch-here.lock").symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"), lock_watch(tmp_path, "here"):
        pass
    assert target.read_text() == "mine"


def test_watch_works_without_file_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(fcntl, "flock", refuses)
    with lock_watch(tmp_path, "here"), lock_watch(tmp_path, "here"):
        pass


def test_learned_limits_are_at_most_five_times_p99():
    from gangline.pulse import layout
    from gangline.pulse.layout import PHASES

    histogram = [0] * 256
    for n in range(1000):
        histogram[layout.find_column(int((0.8 if n < 985 else 1.0) * 1e9))] += 1
    assert 1.0 <= estimate_percentile(histogram, 0.99) <= 1.25
    seen = rank(0).pulse
    lasted = {phase: [0] * 256 for phase in PHASES} | {"forward": histogram, "data": [8, *[0] * 255]}
    one = Seen(**{**vars(seen), "lasted": lasted})
    options = HangsOptions()
    known = learn_limits([one, one], options)
    assert 2.0 < known["forward"] <= 5.0
    assert known["data"] == 2.0
    assert get_limit("backward", known, options) == options.unlearned_seconds
    assert get_limit("end", known, options) == float("inf")
