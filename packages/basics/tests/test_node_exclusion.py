"""Excluded nodes in `launch=elastic`: expiry, and return of excluded nodes when too few others remain."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from gangline.run import attempts
from gangline.run.attempts import Attempt, stamp
from gangline_basics.launch.config import ElasticLaunch
from gangline_basics.launch.exclusion import Exclusion, list_excluded, stays_away
from gangline_basics.launch.meeting import JobMeeting, meet_in

NOW = datetime(2030, 1, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("there", "out", "fewest", "away"),
    [
        ("abc", "a", 2, "a"),
        ("ab", "a", 2, ""),  # too few nodes without a
        ("ab", "ab", 1, "b"),  # each counts the other; the first excluded takes part
        ("ab", "ba", 1, "a"),
        ("abc", "abc", 2, "c"),
        ("abcd", "ab", 3, "b"),
        ("abc", "dab", 2, "b"),  # d is not live
        ("ab", "", 1, ""),
    ],
)
def test_excluded_node_waits_if_enough_others_remain(there, out, fewest, away):
    assert [name for name in there if stays_away(name, set(there) - {name}, [*out], fewest)] == [*away]


def exclude(run_dir, *names: str, days: int = 0) -> None:
    when = stamp((NOW - timedelta(days=days)).timestamp())
    attempts.append(run_dir, Attempt(1, None, action="restart", exclude=names, time=when))


def test_exclusion_expires(tmp_path):
    exclude(tmp_path, "a", "b", days=3)
    exclude(tmp_path, "c", days=1)
    exclude(tmp_path, "a", days=0)  # excluded again after its return
    assert list_excluded(tmp_path, None, NOW) == ["a", "b", "c"]
    assert list_excluded(tmp_path, 48, NOW) == ["a", "c"]
    assert list_excluded(tmp_path, 1, NOW) == ["a"]
    assert list_excluded(tmp_path, 1, NOW + timedelta(hours=2)) == []


@pytest.fixture
def meet(tmp_path):
    """Function that lets nodes join a rendezvous; each node is an agent with a thread for its heartbeats."""
    meetings: dict[str, JobMeeting] = {}

    def meeting_of(name: str, nodes: str) -> JobMeeting:
        config = ElasticLaunch(nodes=nodes, gather_seconds=60.0, lost_seconds=60.0)
        meetings[name] = found = meet_in(tmp_path, "job", f"127.0.0.{len(meetings) + 1}", config)
        found.name(name)
        return found

    def join(names: str, nodes: str = "2:3") -> dict[str, JobMeeting]:
        for name in names:
            meeting_of(name, nodes)
        threads = [threading.Thread(target=meetings[name].handler.next_rendezvous) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return meetings

    (tmp_path / "logs").mkdir()
    yield join
    for meeting in meetings.values():
        meeting.handler._stop_heartbeats()


def test_rendezvous_lists_other_nodes_by_name(meet):
    meetings = meet("abc")
    assert meetings["a"].list_others() == {"b", "c"}
    meetings["b"].leave()
    assert meetings["a"].list_others() == {"c"}
    meetings["c"].check_open()
    meetings["a"].handler.shutdown()
    with pytest.raises(RendezvousClosedError):
        meetings["c"].check_open()


def test_lost_node_is_detected_when_same_name_rejoins(meet, tmp_path):
    """Check that members notice a lost node: without its ranks, the other ranks never reach a step boundary."""
    meetings = meet("abc")
    for meeting in meetings.values():
        meeting.record_members()
    meetings["b"].handler._stop_heartbeats()
    assert meetings["a"].list_replaced() == set()

    def join(name: str, address: str) -> JobMeeting:
        found = meet_in(tmp_path, "job", address, ElasticLaunch(nodes="2:3", gather_seconds=60.0, lost_seconds=60.0))
        found.name(name)

        def wait() -> None:
            with contextlib.suppress(RendezvousClosedError, RendezvousGracefulExitError):
                found.handler.next_rendezvous()

        waiting.append(threading.Thread(target=wait))
        waiting[-1].start()
        return found

    waiting: list[threading.Thread] = []
    new = [join("d", "127.0.0.8"), join("b", "127.0.0.9")]
    deadline = time.monotonic() + 60
    while not (found := meetings["a"].list_replaced()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == {"b"}, "d is new, and nobody's successor"
    meetings["a"].handler.shutdown()
    for thread, meeting in zip(waiting, new, strict=True):
        thread.join(60)
        meeting.handler._stop_heartbeats()


def test_second_excluded_node_waits_until_needed(meet, tmp_path):
    meetings = meet("abc")
    exclude(tmp_path, "a", "b")
    said: list[str] = []
    nodes = {name: Exclusion(name, tmp_path, meetings[name], 2, None, 0.0, said.append) for name in "abc"}
    for name in "ac":
        nodes[name].wait()
        meetings[name].record_members()
    assert said == ["train: node a is excluded by a health check, but takes part: too few other nodes are live"]
    waits = threading.Thread(target=nodes["b"].wait)
    waits.start()
    waits.join(2)
    assert waits.is_alive()
    assert meetings["c"].list_others() == {"a"}
    meetings["c"].leave()
    waits.join(60)
    assert not waits.is_alive()
    assert said[1:] == [
        "train: node b is excluded by a health check: waiting while other nodes train",
        "train: node b was excluded by a health check, and takes part again: too few other nodes are live",
    ]


class FakeRendezvous:
    """Rendezvous at which the nodes `others` are live."""

    def __init__(self, *others: str) -> None:
        self.others_ = others

    def list_others(self):
        return self.others_

    def list_waiting(self):
        return ()


@pytest.mark.parametrize(("machines", "out"), [(True, ["b/5", "b/2", "a/0"]), (False, ["b/2", "a/7"])])
def test_exclusion_by_machine_covers_all_machine_nodes(tmp_path, machines, out):
    """Check node names of a recreated pod, which has another number, or the same number on another machine."""
    exclude(tmp_path, "b/2", "a/7")
    exclusion = Exclusion("b/5", tmp_path, FakeRendezvous("a/0", "b/2", "c/3"), 2, None, 0.0, print, machines)
    assert exclusion._list_excluded() == out


def test_node_between_rendezvous_rounds_counts_as_present(meet, tmp_path):
    """Check that an excluded node does not return while members have left one start and not yet joined the next."""
    meetings = meet("abc")
    exclude(tmp_path, "b")
    said: list[str] = []
    nodes = {name: Exclusion(name, tmp_path, meetings[name], 2, None, 0.0, said.append) for name in "abc"}
    for name in "ac":
        nodes[name].wait()
        meetings[name].leave()
    waits = threading.Thread(target=nodes["b"].wait, daemon=True)
    waits.start()
    waits.join(2)
    assert waits.is_alive(), said
    for name in "ac":
        meetings[name].record_members()  # deletes the announcements of a and c, so both are lost
    waits.join(60)
    assert not waits.is_alive()


def test_earliest_excluded_node_returns_first(meet, tmp_path):
    """Check that waiting nodes, which have left the rendezvous, still count each other as live."""
    meetings = meet("abvw", nodes="2:4")
    exclude(tmp_path, "w", "v")
    said: list[str] = []
    nodes = {name: Exclusion(name, tmp_path, meetings[name], 2, None, 0.0, said.append) for name in "vw"}
    threads = {name: threading.Thread(target=nodes[name].wait, daemon=True) for name in "vw"}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + 60
    while meetings["a"].list_others() != {"b"} or meetings["a"].list_waiting() != {"v", "w"}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    meetings["b"].leave()
    threads["w"].join(60)
    assert not threads["w"].is_alive()
    threads["v"].join(2)
    assert threads["v"].is_alive()
    assert said[-1] == (
        "train: node w was excluded by a health check, and takes part again: too few other nodes are live"
    )
