"""Generations of a run: count, agreement of all nodes, restart budgets, and blocked writes of older generations."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import signal
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from gangline.errors import Problem, UserError
from gangline.launch.signals import HandedOn
from gangline.run import attempts, generation
from gangline.run.attempts import Attempt
from gangline.run.ending import EXIT_REQUEUE, RunEnding, clear_ending, read_ending, write_ending
from gangline.run.events import Events, read_events
from gangline.run.generation import FILE, Fenced, advance, hold, read_progress
from gangline_basics.cluster.given import GivenNodes, read_nodes
from gangline_basics.launch import elastic, failures, meeting_state, worker
from gangline_basics.launch.config import ElasticLaunch, LocalLaunch
from gangline_basics.launch.elastic import Agent, AgentNode, RankFiles
from gangline_basics.launch.failures import RankFailure
from gangline_basics.launch.meeting import FileBackend, meet_in
from gangline_basics.launch.placed import PlacedAddress
from gangline_basics.launch.starts import JobStart, Starts


@pytest.fixture
def first(tmp_path, monkeypatch):
    """Return a run directory in which this process is a rank of the first generation."""
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv(generation.VARIABLE, str(advance(tmp_path, first=True).generation))
    return tmp_path


def test_generations_are_counted_per_directory(tmp_path):
    assert read_progress(tmp_path).generation == 0
    assert [advance(tmp_path, first=number == 2).generation for number in range(4)] == [1, 2, 3, 4]


def test_older_generation_writes_nothing(first):
    events = Events(first, 1)
    with hold(first):
        attempts.append(first, Attempt(1, None))
    events.write("start")
    advance(first)
    events.write("end")
    assert [line["event"] for line in read_events(first)] == ["start"]
    with pytest.raises(Fenced, match="generation 2 has started, and this rank is of generation 1"), hold(first):
        pytest.fail("it was let in")


def test_start_waits_for_writer_with_timeout(first, monkeypatch):
    monkeypatch.setattr(generation, "HELD_SECONDS", 0.3)
    began = time.monotonic()
    with hold(first):
        assert advance(first).generation == 2
    assert time.monotonic() - began >= 0.3
    handle = os.open(first / FILE, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the lock is free again
    os.close(handle)


def test_starts_without_a_new_step_are_counted(first):
    with hold(first, step=5):
        pass
    assert [advance(first, counts=True).futile for _ in range(3)] == [0, 1, 2]
    with pytest.raises(Fenced), hold(first, step=6):
        pass
    assert read_progress(first).step == 5


def test_stopped_writer_does_not_reset_generation(first, monkeypatch):
    """Begin a generation while a rank is suspended in `hold`: the start waits for the lock only up to a timeout."""
    monkeypatch.setattr(generation, "HELD_SECONDS", 0.01)
    kept = generation._recover
    begun = []

    def stalls(*args):
        now = kept(*args)
        if not begun:
            begun.append(True)
            begun.append(advance(first))  # while the rank is suspended
        return now

    monkeypatch.setattr(generation, "_recover", stalls)
    with hold(first, step=7):
        pass
    assert read_progress(first).generation == 2
    assert read_progress(first).step == 7
    with pytest.raises(Fenced), hold(first):
        pass
    assert advance(first).generation == 3


@pytest.mark.parametrize("torn", ["", '{"generation": 2', "[]", "\0" * 256])
def test_truncated_generation_file_repeats_no_generation(first, torn):
    for number in (1, 2, 3):
        events = Events(first, number, by="launcher")
        events.write("launch")
        events.close()
    (first / FILE).write_text(torn)
    with pytest.raises(Fenced), hold(first):
        pass
    assert advance(first, first=True).generation == 4


def starts(run_dir, usable=8, **options) -> tuple[Starts, list[str]]:
    said: list[str] = []

    def layout(ranks: int) -> tuple[int, list[Problem]]:
        return (min(ranks, usable), []) if usable else (0, [Problem("nothing fits.", "why", "how")])

    return Starts(run_dir, LocalLaunch(**options), layout, said.append), said


def test_ranks_beyond_layout_become_spares(tmp_path):
    (tmp_path / "logs").mkdir()
    decides, _ = starts(tmp_path, usable=4)
    decides.places = ["top.rack0.a", "top.rack0.b", "top.rack1.c"]
    assert read_nodes(tmp_path) is None
    start = decides.begin(["a", "b", "c"], 6, first=True)
    assert start == JobStart(1, ("a", "b", "c"), 4, 2)
    given = read_nodes(tmp_path)
    assert given == GivenNodes(("a", "b", "c"), ("top.rack0.a", "top.rack0.b", "top.rack1.c"), 4, 2)
    assert (given.build_topology().gpus_per_node, given.build_topology().nodes_per_rack) == (2, 2)
    assert JobStart.of(start.to_dict()) == start
    (launch,) = read_events(tmp_path)
    assert (launch["event"], launch["by"], launch["why"], launch["spares"]) == ("launch", "launcher", "start", 2)


def test_start_without_fitting_layout_ends_job(tmp_path):
    (tmp_path / "logs").mkdir()
    stop = starts(tmp_path, usable=0)[0].begin(["a"], 6, first=True).stop
    assert (stop.kind, stop.exit_code, stop.what, stop.details) == ("user", 2, "nothing fits.", ["why", "how"])


@pytest.mark.parametrize(
    ("failure", "nodes", "why"),
    [
        (RankFailure(1, "bug", 1, "it was killed by SIGKILL"), ["a", "b"], "rank"),
        (RankFailure(1, "restart", 3, "bad-link at rank 0"), ["a", "b"], "response"),
        (None, ["a"], "node"),
        (None, ["a", "b", "c"], "joined"),
        (RankFailure(0, "ended", 75), ["a", "b", "c"], "joined"),
        (RankFailure(0, "ended", 75), ["a"], "node"),
        (RankFailure(0, "ended", 75), ["a", "b"], "rank"),
        (None, ["a", "b"], "rank"),
    ],
)
def test_restart_reason_is_logged(tmp_path, failure, nodes, why):
    (tmp_path / "logs").mkdir()
    decides, said = starts(tmp_path, max_restarts=None)
    decides.begin(["a", "b"], 8, first=True)
    if failure is not None:
        failures.claim(tmp_path / "logs", 1, failure)
    decides.note_end()
    assert decides.begin(nodes, 8, first=False).stop is None
    launch = read_events(tmp_path)[-1]
    assert (launch["why"], launch["generation"]) == (why, 2)
    assert launch["found"] is not None
    assert said


MISSED = RunEnding(generation=1, reason="killed", exit_code=75, requeue=True, evidence="launch.nodes=2: ...")
PREEMPTED = RunEnding(generation=1, reason="preempted", exit_code=75, requeue=True, evidence="SIGTERM at step 5")
LOST = RunEnding(generation=1, reason="killed", exit_code=1, requeue=True, evidence="the server is gone\nThe logs: ...")
BUG = RankFailure(1, "bug", 1, "OSError: no driver", member="health/mine")


@pytest.mark.parametrize(
    ("failure", "ending", "told"),
    [
        (BUG, "its own", ("bug", "rank 1 failed first: OSError: no driver", "health/mine", 1)),
        (BUG, None, ("bug", "rank 1 failed first: OSError: no driver", "health/mine", 1)),
        (None, None, ("killed", "all ranks were killed before one reported an error", "", 1)),
        (None, LOST, ("killed", "the server is gone", "", 1)),
        (None, MISSED, ("preempted", "", "", 0)),
        (None, PREEMPTED, ("preempted", "", "", 0)),
        (RankFailure(0, "ended", 75), None, ("preempted", "", "", 0)),
        (RankFailure(0, "ended", 3), "its own", ("verdict", "", "", 0)),
        (RankFailure(0, "restart", 3, "bad-link"), None, ("restart", "", "", 0)),
        (RankFailure(0, "user", 2, "a mistake"), "its own", ("mistake", "", "", 0)),
        (None, RunEnding(generation=1, reason="done", exit_code=0), ("done", "", "", 0)),
    ],
)
@pytest.mark.parametrize("changed", [False, True], ids=["as it was", "changed"])
def test_first_start_logs_previous_job_ending(tmp_path, failure, ending, told, changed):
    """Begin a new job of the run: its first launch is not a restart, but it reports the failure of the previous job."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.yaml").write_text("run: {}\n")
    starts(tmp_path)[0].begin(["a"], 2, first=True)
    if failure is not None:
        failures.claim(tmp_path / "logs", 1, failure)
    if ending == "its own":
        Starts.end(tmp_path, 1, failure)
    elif ending is not None:
        write_ending(tmp_path, ending)
    if changed:
        (tmp_path / "config.yaml").write_text("run: {steps: 9}\n")
    assert starts(tmp_path)[0].begin(["a"], 2, first=True).stop is None
    first, launch = [line for line in read_events(tmp_path) if line["event"] == "launch"]
    assert (first["why"], first["after"], launch["why"]) == ("start", "", "start")
    names = ("after", "evidence", "member", "futile")
    assert tuple(launch[name] for name in names) == (("", "", "", 0) if changed else told)


def test_earlier_job_failure_takes_no_restart(tmp_path):
    (tmp_path / "logs").mkdir()
    for number in range(1, 7):
        decides, _ = starts(tmp_path, max_restarts=None, futile_restarts=1)
        assert decides.begin(["a"], 2, first=True).stop is None
        failures.claim(tmp_path / "logs", number, BUG)
    assert read_events(tmp_path)[-1]["futile"] == 5
    assert decides.begin(["a"], 2, first=False).stop is None
    failures.claim(tmp_path / "logs", 7, BUG)
    assert decides.begin(["a"], 2, first=False).stop == BUG, "and this one starts no ranks"
    assert starts(tmp_path)[0].begin(["a"], 2, first=True).stop is None
    assert read_events(tmp_path)[-1]["futile"] == 7


@pytest.mark.parametrize("steps", [0, 5])  # steps of the first start
@pytest.mark.parametrize(
    ("kind", "options", "allowed"),
    [
        ("bug", {"max_restarts": 2}, 2),
        ("bug", {"max_restarts": None, "futile_restarts": 3}, 3),
        ("restart", {"max_restarts": 0, "futile_restarts": 2}, 2),  # a restart that a verdict requests is not a failure
        ("user", {"max_restarts": None}, 0),
        ("ended", {"max_restarts": None}, 0),
    ],
)
def test_restart_budget_depends_on_failure_kind(tmp_path, monkeypatch, kind, options, allowed, steps):
    (tmp_path / "logs").mkdir()
    decides, _ = starts(tmp_path, **options)
    decides.begin(["a"], 2, first=True)
    monkeypatch.setenv(generation.VARIABLE, "1")
    with hold(tmp_path, step=steps):
        pass
    for number in range(1, 10):
        failures.claim(tmp_path / "logs", number, RankFailure(0, kind, 3 if kind == "ended" else 1, "why"))
        if decides.begin(["a"], 2, first=False).stop is not None:
            break
    assert number - 1 == allowed


def test_requested_restart_leaves_failure_budget_unchanged(tmp_path):
    (tmp_path / "logs").mkdir()
    decides, said = starts(tmp_path, max_restarts=1)
    decides.begin(["a"], 2, first=True)
    for number, kind in enumerate(("restart", "bug", "restart"), 1):
        failure = RankFailure(0, kind, 1, "why")
        failures.claim(tmp_path / "logs", number, failure)
        assert decides.stop(decides.predict(failure), failure) is None
        assert decides.begin(["a"], 2, first=False).stop is None
    assert said[1] == "train: rank 0 failed first: why; restart 1 of 1"
    failures.claim(tmp_path / "logs", 4, BUG)
    assert decides.stop(decides.predict(BUG), BUG) == BUG
    assert decides.begin(["a"], 2, first=False).stop == BUG


def test_progress_resets_restart_budget(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    decides, _ = starts(tmp_path, max_restarts=None, futile_restarts=1)
    decides.begin(["a"], 2, first=True)
    for number in range(1, 6):
        monkeypatch.setenv(generation.VARIABLE, str(number))
        with hold(tmp_path, step=number):
            pass
        failures.claim(tmp_path / "logs", number, RankFailure(0, "bug", 1, "why"))
        assert decides.begin(["a"], 2, first=False).stop is None


def test_incomplete_ending_file_is_ignored(tmp_path):
    ending = RunEnding(generation=3, reason="verdict", exit_code=3, exclude=("a",), evidence="bad-link")
    assert read_ending(tmp_path) is None
    write_ending(tmp_path, ending)
    assert read_ending(tmp_path) == ending
    (tmp_path / "ending.json").write_text('{"generation": 3')
    assert read_ending(tmp_path) is None
    clear_ending(tmp_path)
    clear_ending(tmp_path)
    assert read_ending(tmp_path) is None


def meeting_of(*nodes: str, closed: bool = False) -> bytes:
    """Return a pickled state of torch's rendezvous with a value in each field."""
    state = _RendezvousState()
    state.round, state.complete, state.closed = 3, True, closed
    state.deadline = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    placed = [PlacedAddress(name, f"spine.rack{9 - index}") if index else name for index, name in enumerate(nodes)]
    members = [_NodeDesc(name, 100 + index, index) for index, name in enumerate(placed)]
    state.participants = {node: rank for rank, node in enumerate(members)}
    state.wait_list, state.redundancy_list = {_NodeDesc("waits", 1, 0)}, {_NodeDesc("spare", 2, 0)}
    state.last_heartbeats = {node: datetime.now(UTC) for node in members}
    return pickle.dumps(state)


def test_rendezvous_state_round_trips_through_json():
    pickled = meeting_of("n1", "n2", closed=True)
    assert vars(meeting_state.decode(meeting_state.encode(pickled))) == vars(pickle.loads(pickled))


def test_rendezvous_state_ignores_a_stale_token(tmp_path):
    """Refuse to set a state with an older token, and return the newer state, as torch's own backends do."""
    backend = FileBackend(tmp_path / "state")
    assert backend.get_state() is None
    _, token, set_here = backend.set_state(meeting_of("one"))
    assert set_here
    assert members(backend.set_state(meeting_of("other"), None)) == ({"one"}, False)
    newer, set_here = backend.set_state(meeting_of("one", "two"), token)[1:]
    assert set_here
    assert members(backend.set_state(meeting_of("late"), token)) == ({"one", "two"}, False)
    state, read = FileBackend(tmp_path / "state").get_state()
    assert (members((state, read, True))[0], read) == ({"one", "two"}, newer)


def members(answer: tuple[bytes, object, bool]) -> tuple[set[str], bool]:
    return {str(node.addr) for node in pickle.loads(answer[0]).participants}, answer[2]


def test_rendezvous_state_survives_killed_writer(tmp_path, monkeypatch):
    backend = FileBackend(tmp_path / "state")
    _, token, _ = backend.set_state(meeting_of("one"))

    class Killed(Exception):
        pass

    def killed(*args):
        raise Killed

    for name in ("replace", "open", "fdopen"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, killed)
            with contextlib.suppress(Killed):
                backend.set_state(meeting_of("two"), token)
        state = FileBackend(tmp_path / "state").read()
        assert state is not None
        assert {str(node.addr) for node in state.participants} in ({"one"}, {"two"})


class Trap:
    """Object that touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_rendezvous_state_from_a_pickle_is_refused_unread(tmp_path):
    (tmp_path / "state").write_bytes(pickle.dumps(Trap(tmp_path / "executed")))
    for read in (FileBackend.get_state, FileBackend.read):
        with pytest.raises(UserError, match="invalid state of a rendezvous"):
            read(FileBackend(tmp_path / "state"))
    assert not (tmp_path / "executed").exists()


def test_rendezvous_folder_of_another_user_is_refused(tmp_path):
    if os.geteuid():
        pytest.skip("only root can give a folder to another user")
    folder = tmp_path / ".meeting"
    folder.mkdir()
    os.chown(folder, 12345, -1)
    with pytest.raises(UserError, match="its owner is user 12345"):
        meet_in(tmp_path, "job", "127.0.0.1", ElasticLaunch())
    os.chown(folder, 0, -1)
    folder.chmod(0o777)
    meet_in(tmp_path, "job", "127.0.0.1", ElasticLaunch())
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("nodes", "code"), [(["a", "b"], 75), (["a"], None)])
def test_sigterm_to_a_rank_counts_as_a_restart(tmp_path, nodes, code):
    """Continue without the node that received SIGTERM; if both nodes are there again, the restart budget decides."""
    (tmp_path / "logs").mkdir()
    decides, said = starts(tmp_path, max_restarts=0)
    decides.begin(["a", "b"], 8, first=True)
    failures.claim(tmp_path / "logs", 1, RankFailure(0, "ended", 75))
    decides.note_end()
    stop = decides.begin(nodes, 8, first=False).stop
    assert (stop and (stop.exit_code, stop.make_ending(2).reason)) == (code and (code, "preempted"))
    assert bool(said) == (stop is None)


@pytest.mark.parametrize(("written_before", "expected"), [("a", [75, 75]), ("b", [143, 75]), (None, [143, 143])])
def test_only_last_signaled_node_reports_job_end(tmp_path, first, written_before, expected):
    """Check that a node that leaves first does not report the end of the job, because the other nodes continue.

    The ranks of a node may end before rank 0, on another node, has written how the run ended.
    """
    store, codes, ends = HashStore(), [], []
    for name in ("a", "b"):
        if name == written_before:
            write_ending(tmp_path, replace(PREEMPTED, generation=2))
        node = AgentNode(name, 1, None, lambda: 1, alone=False, left=lambda number: store.add(f"left/{number}", 1))
        files = RankFiles(tmp_path / "logs", node)
        files.start = JobStart(2, ("a", "b"), 2, 0)
        codes.append(elastic._report_signal(starts(tmp_path)[0], files, signal.SIGTERM))
        ends.append([line["event"] for line in read_events(tmp_path)])
    assert (codes, ends) == (expected, [[], ["exit"]])


@pytest.mark.parametrize(
    ("failure", "leads", "said"),
    [
        (RankFailure(0, "bug", 1, "boom", trace="Traceback\n"), (False, True), "rank 0 failed first: boom"),
        (RankFailure(0, "lost", 1, "node b is lost"), (False, True), "node b is lost"),
        (RankFailure(0, "lost", 1, "node b is lost"), (True, False), "node b is lost"),
    ],
)
def test_failure_of_two_nodes_is_reported_once(tmp_path, first, capsys, failure, leads, said):
    """Report a failure of two nodes: the leading node reports a bug, and the first caller reports a lost node."""
    stopped = elastic.Stopped(1, failure)
    assert [elastic._explain(stopped, starts(tmp_path)[0], one) for one in leads] == [1, 1]
    assert capsys.readouterr().err.count(said) == 1
    assert [line["event"] for line in read_events(tmp_path)] == ["exit"]
    assert read_ending(tmp_path).exit_code == 1


def test_spare_exits_when_agent_requests_stop(tmp_path, monkeypatch):
    """End the spare, because otherwise the next start would wait for it until the agent's timeout."""
    monkeypatch.setenv("RANK", "2")
    asked = iter([None, None, "SIGUSR2"])
    monkeypatch.setattr("gangline.launch.signals.stop_requested", lambda: next(asked))
    monkeypatch.setattr("gangline_basics.launch.worker.SPARE_SECONDS", 0.0)
    assert worker._wait(str(tmp_path), 1) == EXIT_REQUEUE


@pytest.mark.parametrize(
    ("failure", "signum"),
    [
        (None, HandedOn.SIGTERM),  # the ranks make room for a node, at a step boundary
        (RankFailure(0, "ended", 75), HandedOn.SIGTERM),
        (RankFailure(0, "bug", 1, "it was killed by SIGKILL"), signal.SIGKILL),  # no step boundary can be reached
    ],
)
def test_peer_failure_on_another_node_kills_ranks(tmp_path, failure, signum):
    (tmp_path / "logs").mkdir()
    decides, _ = starts(tmp_path, max_restarts=None)
    files = RankFiles(tmp_path / "logs", AgentNode("a", 1, None, lambda: 1, alone=False))
    files.start = decides.begin(["a", "b"], 2, first=True)
    if failure is not None:
        failures.claim(tmp_path / "logs", 1, failure)
    agent = object.__new__(Agent)
    agent.files, agent.node, agent.starts, agent.grace = files, files.node, decides, 60.0
    given = []
    agent._shutdown = lambda death_sig, timeout=0: given.append(death_sig)
    agent._stop_workers(SimpleNamespace(state=WorkerState.HEALTHY))
    assert given == [signum]
