"""`launch=elastic` with real processes: killed, stopped, disconnected, rejoining and excluded nodes.

The loss curve equals that of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec

from gangline.launch import guard
from gangline.launch.network import NAME
from gangline.run.directory import RunDirectory
from gangline.run.ending import read_ending
from gangline.run.events import read_events
from gangline_basics.launch import elastic, meeting, node, several
from gangline_basics.launch.config import ElasticLaunch
from gangline_basics.launch.meeting import FileBackend
from gangline_basics.launch.starts import Starts
from gangline_testkit.processes import find_rank_processes, kill
from gangline_testkit.real_runs import SMALL, RealRuns
from gangline_testkit.runs import build_small_run

WORDS = (*SMALL, "parallel=ddp", "precision=fp64", "run.deterministic=on", "schedule=constant")
ELASTIC = ("launch=elastic", "launch.processes=2", "checkpoint.every=5", "callback=[paced]")
FEW_WARM = ("run.steps=100000", "schedule.warmup_steps=5")  # a short warmup, so that errors show in the first steps
SECONDS = 240.0


PACED = """
import time
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.callback import Callback
from gangline.config.schema import CallbackConfig


@dataclass
class Paced(CallbackConfig):
    pass


class PacedCallback(Callback):
    def __init__(self, config, run):
        pass

    def before_step(self, step):
        time.sleep(0.05)


@hookimpl
def gangline_callbacks():
    yield Part(name="paced", config=Paced, build="paced:PacedCallback", summary="Does not hurry")
"""


@pytest.fixture
def runs(tmp_path, strangers):
    """Runs with a callback that sleeps in each step, so that tests can act between steps and other processes run."""
    strangers.add("gangline-paced", PACED, module="paced")
    with RealRuns(tmp_path, WORDS) as found:
        found.environment |= strangers.environment
        yield found


def wait_for(what, seconds=SECONDS):
    """Call `what` until its result is true, and return the result."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def agents(run_dir: Path) -> dict[str, int]:
    """Return the process id of each node agent of the run, by number of the node."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (
                (entry / "cmdline").read_bytes().decode(errors="replace").split("\0") if entry.name.isdigit() else []
            )
            if "gangline_basics.launch.node" in words and os.readlink(entry / "cwd") == str(run_dir.parent):
                found[words[words.index("gangline_basics.launch.node") + 2]] = int(entry.name)
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def launches(run_dir: Path) -> list[dict]:
    return [line for line in read_events(run_dir) if line["event"] == "launch"]


def same(curve, other) -> None:
    assert [step for step, *_ in curve] == [step for step, *_ in other]
    for (_, loss, norm), (_, loss2, norm2) in zip(curve, other, strict=True):
        assert loss == pytest.approx(loss2, rel=1e-12)
        assert norm == pytest.approx(norm2, rel=1e-10)


def test_rank_loss_and_node_rejoin_keep_loss_curve(runs):
    """Compare the loss curve of 2, 2, 1 and 2 ranks in turn with that of one process."""
    out = runs.directory / "out"
    patient = "launch.lost_seconds=10"  # so that a slow node does not count as lost
    process = runs.fork("run.dir=out", *FEW_WARM, *ELASTIC, "launch.nodes=1:2", patient)
    runs.wait_for_step(process, "out", 7)
    before = len(launches(out))
    os.kill(find_rank_processes(out)[1], signal.SIGKILL)
    wait_for(lambda: len(launches(out)) > before)
    runs.wait_for_step(process, "out", 12)
    before = len(launches(out))
    agent = agents(out)["0"]
    launcher = parent(agent)
    os.kill(launcher, signal.SIGSTOP)  # the launcher would restart the agent too early
    os.kill(agent, signal.SIGKILL)
    wait_for(lambda: len(launches(out)) > before)
    os.kill(launcher, signal.SIGCONT)
    wait_for(lambda: launches(out)[-1]["why"] == "joined")
    runs.wait_for_step(process, "out", runs.read_records("out")[-1]["step"] + 3)
    os.kill(process.pid, signal.SIGTERM)
    printed = runs.finish(process, code=75)
    assert [line["processes"] for line in launches(out)][before:] == [1, 2], printed
    assert "was killed by SIGKILL" in printed
    assert read_ending(out).reason == "preempted"
    assert read_events(out)[-1]["event"] == "exit"
    assert (agents(out), find_rank_processes(out)) == ({}, {})
    steps = runs.read_records("out")[-1]["step"]
    runs.train("run.dir=straight", *FEW_WARM, f"run.steps={steps}", "checkpoint=off", "launch.processes=1")
    same(runs.read_curve("out"), runs.read_curve("straight"))


@pytest.mark.nightly
def test_disconnected_node_stops_writing(runs):
    """Stop the agent of a node while its rank continues to train: the waiting node takes over the run."""
    out = runs.directory / "out"
    words = ("run.dir=out", "run.steps=100000", *ELASTIC, "launch.processes=1", "launch.nodes=1", "launch.agents=1")
    nodes = [runs.start(*words, GANGLINE_NODE="127.0.0.1") for _ in range(2)]
    runs.wait_for_step(nodes[0], "out", 5)
    rank = find_rank_processes(out)[0]
    agent = parent(parent(rank))  # the parent of the rank is the fork server
    (other,) = {process.pid for process in nodes} - {agent}
    wait_for(lambda: len(list((out / ".meeting").glob("state-*"))) == 1 and joined(out, other))
    os.kill(agent, signal.SIGSTOP)
    wait_for(lambda: len(launches(out)) == 2)
    wait_for(lambda: not guard.is_alive(rank) or Path(f"/proc/{rank}/stat").read_text().split()[2] == "Z")
    wait_for(lambda: 2 in generations_of(out))
    generations = generations_of(out)
    assert generations == sorted(generations), "the old generation wrote after the new one"
    assert "generation 2 has started, and this rank is of generation 1" in (out / "logs" / "rank-00000.log").read_text()
    os.kill(agent, signal.SIGCONT)
    for process in nodes:
        kill(process)


def test_too_few_nodes_exit_with_requeue(runs):
    few = (*ELASTIC, "launch.nodes=2", "launch.agents=1", "launch.join_seconds=3")
    printed = runs.train("run.dir=out", "run.steps=5", *few, code=75, GANGLINE_NODE="127.0.0.1")
    assert "launch.nodes=2: fewer nodes than the minimum joined within 3 s (launch.join_seconds)" in printed
    ending = read_ending(runs.directory / "out")
    assert (ending.exit_code, ending.requeue) == (75, True)


@pytest.mark.nightly
def test_terminated_node_leaves_other_nodes_running(runs):
    """Check that all ranks save at the end of the step, and that the remaining ranks continue from this save."""
    out = runs.directory / "out"
    words = (
        "run.dir=out",
        "run.steps=100000",
        *ELASTIC,
        "launch.nodes=1:2",
        "launch.agents=1",
        "checkpoint.every=1000",
    )
    nodes = [runs.start(*words, GANGLINE_NODE=f"127.0.0.{number}") for number in (1, 2)]
    runs.wait_for_step(nodes[0], "out", 5)
    wait_for(lambda: launches(out)[-1]["processes"] == 2)
    done = runs.read_records("out")[-1]["step"]
    os.kill(nodes[1].pid, signal.SIGTERM)
    assert nodes[1].wait(SECONDS) == 75
    wait_for(lambda: launches(out)[-1]["processes"] == 1)
    runs.wait_for_step(nodes[0], "out", runs.read_records("out")[-1]["step"] + 3)
    start = runs.read_attempts("out")[-1]["start"]
    assert int(start.split("-")[1]) >= done, "nothing was done again"
    os.kill(nodes[0].pid, signal.SIGTERM)
    assert nodes[0].wait(SECONDS) == 75


def generations_of(run_dir: Path) -> list[int]:
    """Return the generation of each line of metrics.jsonl."""
    return [json.loads(line)["generation"] for line in (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]]


def joined(run_dir: Path, pid: int) -> bool:
    """Return whether the rendezvous has a heartbeat of the agent with process id `pid`."""
    (path,) = (run_dir / ".meeting").glob("state-*")
    state = FileBackend(path).read()
    return state is not None and pid in {node.pid for node in state.last_heartbeats}


@pytest.mark.nightly
def test_same_command_resumes_after_all_processes_killed(runs):
    words = ("run.dir=out", "run.steps=60", *ELASTIC, "launch.nodes=2")
    process = runs.start(*words)
    runs.wait_for_step(process, "out", 12)
    kill(process)
    runs.train(*words)
    out = runs.directory / "out"
    assert [line["generation"] for line in launches(out)] == [1, 2]
    assert [record["step"] for record in runs.read_records("out")] == list(range(1, 61))
    ended = runs.train(*words)
    assert "the run has ended: step 60 is done" in ended
    said = runs.expect_refusal(*words, "optimizer.learning_rate=0.5")
    assert (
        "already holds another run: optimizer.learning_rate is 0.003 in the directory and 0.5 in this command" in said
    )


JOINS_AND_DIES = """
import os, signal, sys
from pathlib import Path
from gangline_basics.launch.config import ElasticLaunch
from gangline_basics.launch.meeting import meet_in
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

meeting = meet_in(Path(sys.argv[1]), "job", "127.0.0.1", ElasticLaunch(**eval(sys.argv[2])))
RendezvousStoreInfo.build = lambda *given, **named: os.kill(os.getpid(), signal.SIGKILL)  # once the members are known
meeting.handler.next_rendezvous()
"""


def test_node_lost_after_joining_triggers_new_rendezvous(monkeypatch, tmp_path):
    """Check that the remaining node waits for an address until a timeout, and then enters a new rendezvous alone."""
    meets = {"nodes": "1:2", "gather_seconds": 60.0, "lost_seconds": 4.0, "join_seconds": 120.0}
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    first = subprocess.Popen([sys.executable, "-c", JOINS_AND_DIES, str(tmp_path), repr(meets)])
    monkeypatch.setattr(meeting, "STORE_SECONDS", 1.0)
    config = ElasticLaunch(**meets)
    there = meeting.meet_in(tmp_path, "job", "127.0.0.2", config)  # this node is second: nodes are sorted by address
    node = elastic.AgentNode("n1", 1, there.handler, count=lambda: 1, alone=False, meets_seconds=120.0)
    files = elastic.RankFiles(tmp_path, node)
    spec = WorkerSpec("train", 1, rdzv_handler=there.handler, entrypoint=print, max_restarts=0, monitor_interval=1.0)
    starts = Starts(tmp_path, config, lambda ranks: ranks, print)
    agent = elastic.Agent(spec, files, node, starts, grace=1.0)
    met = []

    def now(group):
        met.append((group.group_rank, group.group_world_size))
        return {}

    monkeypatch.setattr(agent, "_start_workers", now)
    alone = threading.Thread(target=lambda: first.wait() and there.patience.has_met())  # a later start needs one node
    alone.start()
    agent._initialize_workers(agent._worker_group)
    alone.join()
    assert first.returncode == -signal.SIGKILL
    assert met == [(0, 1)]
    there.handler.shutdown()


@pytest.mark.parametrize(
    ("agents", "address"),
    [
        ("null", "127.0.0.1"),
        ("2", "node-7"),
    ],
)
def test_loopback_address_requires_all_agents_local(monkeypatch, tmp_path, agents, address):
    """Check also two of four nodes on this machine: ranks of other machines must reach rank 0, which may be here."""
    words = ("parallel=ddp", "launch=elastic", "launch.nodes=4", f"launch.agents={agents}", "launch.processes=4")
    directory = RunDirectory.create(build_small_run(*words, f"run.dir={tmp_path / 'out'}"))
    found = []
    monkeypatch.setenv(NAME, "node-7")
    monkeypatch.setattr(several, "run_node", lambda *given: found.append(given[2:]) or 0)
    assert node.main(str(directory.path), "1", "0") == 0
    assert found == [("node-7/1", address)]


EXCLUDES = """
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.health import Action, HealthCheck, Response, Verdict
from gangline.config.schema import HealthConfig


@dataclass
class Excludes(HealthConfig):
    ranks: str = "rank 1"


class ExcludesCheck(HealthCheck):
    def __init__(self, config, run):
        self.ranks = tuple(config.ranks.split("+"))

    def observe(self, record):
        if record.step == 8:
            yield Verdict("bad-link", "rank 1", 1.0, "1 of 8", Action.STOP)

    def respond(self, agreed, record):
        if agreed.select("bad-link"):
            again = agreed.list_responses("bad-link", Action.RESTART)
            kind = Action.WARN if again else Action.RESTART
            return Response(kind, ("bad-link",), exclude=() if again else self.ranks)


@hookimpl
def gangline_health_checks():
    yield Part(name="excludes", config=Excludes, build="excludes:ExcludesCheck", summary="Excludes rank 1's node")
"""


@pytest.mark.parametrize(
    ("nodes", "found", "ranks"),
    [
        pytest.param("1:2", "rank 1", 1, marks=pytest.mark.nightly),
        pytest.param("2", "rank 1", 2, marks=pytest.mark.nightly),
        ("1:2", "rank 0+rank 1", 1),  # each node counts the other as live
    ],
)
def test_node_is_excluded_if_enough_others_remain(runs, strangers, nodes, found, ranks):
    strangers.add("gangline-excludes", EXCLUDES, module="excludes")
    patient = "launch.lost_seconds=60"  # so that a slow node on a busy machine does not count as lost
    words = (*ELASTIC, f"launch.nodes={nodes}", patient, "health=[excludes]", f"health.excludes.ranks={found}")
    printed = runs.train("run.dir=out", "run.steps=20", *words)
    out = runs.directory / "out"
    first, second = launches(out)
    assert (second["why"], second["processes"]) == ("response", ranks), printed
    assert "bad-link at rank 1: 1 of 8; new workers were requested" in printed
    (line,) = [line for line in runs.read_attempts("out") if line.get("action") == "restart"]
    assert line["exclude"] == first["nodes"][-len(found.split("+")) :]
    waits = f"node {first['nodes'][1]} is excluded by a health check: waiting while other nodes train"
    assert (waits in printed) == (ranks == 1)
    assert printed.count("but takes part: too few other nodes are live") == len(found.split("+")) - (ranks == 1)
    assert [record["step"] for record in runs.read_records("out")] == list(range(1, 21))
    assert agents(out) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch.nodes=3:2"], "the minimum 3 exceeds the maximum 2"),
        (["launch.nodes=two"], "launch.nodes=two must be a number of nodes"),
        (["launch.nodes=2", "launch.agents=1"], "the nodes cannot find each other without run.dir"),
        (["launch.nodes=2", "launch.agents=3"], "the job has at most 2"),
        (["launch.lost_seconds=1"], "must be at least 2"),
    ],
)
def test_invalid_launch_options_are_refused(runs, words, said):
    assert said in runs.expect_refusal(*ELASTIC, *words)
