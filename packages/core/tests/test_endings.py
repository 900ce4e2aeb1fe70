"""Ending of a job with several agents, when ranks or agents could not report it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from gangline.checkpoint.base import SaveFailed
from gangline.checkpoint.id import CheckpointId
from gangline.config.check import _check_variables
from gangline.config.defaults import build_default_run
from gangline.errors import UserError
from gangline.launch.errors import RestartWanted
from gangline.launch.signals import hand_on
from gangline.run import lock
from gangline.run.directory import RunDirectory
from gangline.run.ending import RunEnding, decide_ending, read_ending, write_ending
from gangline.run.events import Events, read_events
from gangline.run.generation import Progress
from gangline.train.rank import train
from gangline_basics.launch import failures, several
from gangline_basics.launch.config import LocalLaunch
from gangline_basics.launch.failures import RankFailure
from gangline_basics.launch.several import Agents
from gangline_basics.launch.starts import Starts
from gangline_testkit.pool import get_pool
from gangline_testkit.sessions import open_session

DONE = RunEnding(generation=1, reason="done", exit_code=0, evidence="step 5 is done")


@pytest.mark.parametrize("before", [None, DONE])
def test_agent_failure_before_rendezvous_is_printed(tmp_path, capfd, before):
    """Use a directory without a run; the ending that an earlier job left there is not the ending of this job."""
    if before is not None:
        write_ending(tmp_path, before)
    assert Agents(tmp_path, 1).watch() == 2
    assert "is not a complete run directory: config.yaml is missing" in capfd.readouterr().err


NOBODY = "all ranks were killed before one reported an error"


@pytest.mark.parametrize(
    ("facts", "reason", "code", "requeue", "text"),
    [
        ({"done": True}, "done", 0, False, "every rank is done"),
        ({"done": True, "signal": "SIGTERM", "failure": "bug"}, "done", 0, False, "every rank is done"),
        ({"signal": "SIGTERM", "saved": True}, "preempted", 75, True, "SIGTERM; all steps are saved"),
        ({"signal": "SIGUSR1", "saved": True}, "preempted", 75, True, "SIGUSR1; all steps are saved"),
        ({"signal": "SIGUSR2", "saved": True}, "preempted", 75, True, "SIGUSR2; all steps are saved"),
        ({"signal": "SIGTERM"}, "signal", 143, False, "SIGTERM; not all steps are saved"),
        ({"signal": "SIGINT", "saved": True}, "signal", 130, False, "SIGINT; all steps are saved"),
        ({"signal": "SIGHUP", "saved": True}, "signal", 129, False, "SIGHUP; all steps are saved"),
        ({"failure": "user", "exit_code": 2}, "mistake", 2, False, "a rank failed"),
        ({"failure": "user", "exit_code": 1}, "mistake", 1, False, "a rank failed"),
        ({"failure": "bug"}, "bug", 1, True, "a rank failed"),
        ({"failure": "restart", "exit_code": 3}, "restart", 3, False, "a rank failed"),
        ({"failure": "restart", "exit_code": 75}, "restart", 75, True, "a rank failed"),
        ({"failure": "ended", "exit_code": 1}, "bug", 1, True, "a rank ended with exit code 1"),
        ({"failure": "ended", "exit_code": 2}, "mistake", 2, False, "a rank ended with exit code 2"),
        ({"failure": "ended", "exit_code": 3}, "verdict", 3, False, "a rank ended with exit code 3"),
        ({"failure": "ended", "exit_code": 75}, "preempted", 75, True, "a rank ended with exit code 75"),
        ({"failure": "ended", "exit_code": 130}, "signal", 130, False, "a rank ended with exit code 130"),
        ({"failure": "ended", "exit_code": 255}, "bug", 255, True, "a rank ended with exit code 255"),
        ({}, "killed", 1, True, NOBODY),
        ({"failure": "lost", "exit_code": 0}, "done", 0, False, NOBODY),
        ({"failure": "lost", "exit_code": 2}, "mistake", 2, False, NOBODY),
        ({"failure": "lost", "exit_code": 3}, "verdict", 3, False, NOBODY),
        ({"failure": "lost", "exit_code": 75}, "killed", 75, True, NOBODY),
        ({"failure": "lost", "exit_code": 137}, "killed", 137, True, NOBODY),
    ],
)
def test_decide_ending_maps_facts_to_reason(facts, reason, code, requeue, text):
    said = decide_ending(4, **facts)
    assert said == RunEnding(generation=4, reason=reason, exit_code=code, requeue=requeue, evidence=text)
    assert decide_ending(4, "words", **facts).evidence == "words"
    excludes = ("n1",) if reason in ("restart", "verdict") else ()
    assert decide_ending(4, **facts, exclude=("n1",)).exclude == excludes


@pytest.mark.parametrize(
    ("code", "reason", "requeue"),
    [
        (1, "bug", True),
        (2, "mistake", False),
        (3, "verdict", False),
        (75, "preempted", True),
        (130, "signal", False),
        (143, "signal", False),
    ],
)
def test_rank_exit_code_determines_ending(tmp_path, code, reason, requeue):
    """End a start in which rank 0 was killed before it wrote the ending."""
    Starts.end(tmp_path, 2, RankFailure(1, "ended", code))
    ending = read_ending(tmp_path)
    assert (ending.reason, ending.requeue, ending.exit_code) == (reason, requeue, code)


@pytest.mark.parametrize(("code", "goes_on"), [(75, True), (3, False)])
def test_rank_with_requeue_exit_code_restarts_under_torchrun(tmp_path, code, goes_on):
    (tmp_path / "logs").mkdir()
    failures.claim(tmp_path / "logs", 1, RankFailure(0, "ended", code))
    program = "import sys; from gangline_basics.launch.worker import main; sys.exit(main(sys.argv[1], 'builtins:len'))"
    environment = {**os.environ, "TORCHELASTIC_RESTART_COUNT": "1", "RANK": "0", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, timeout=120)
    assert ended.returncode == (len(str(tmp_path)) % 256 if goes_on else code)


class CutOff:
    """Job store whose connection breaks from step 3 on, with the error of torch's client."""

    def __init__(self, inner, s):
        self.inner, self.s = inner, s

    def __getattr__(self, name):
        if self.s.step >= 3:
            raise dist.DistNetworkError("Broken pipe")
        return getattr(self.inner, name)


def cut_off(run_dir, bad, steps=12):
    """Train a run in which rank `bad` loses the job store and every save from step 4 on fails.

    Return how the run ended, its actions and its last step.
    """
    s = open_session(run_dir, "parallel=ddp", f"run.steps={steps}", "checkpoint.every=2")
    saves = s.checkpointer.save

    def save(request, *rest):
        if bad is not None and request.step >= 4:
            raise SaveFailed(CheckpointId(request.step, s.attempt), "the job's store is lost")
        return saves(request, *rest)

    s.checkpointer.save = save
    store = s.comms.store
    if s.comms.rank == bad:
        s.comms.store = CutOff(store, s)
    try:
        ended = train(s)
    except UserError as error:
        ended = error.what
    except RestartWanted as error:
        ended = failures.RankFailure.of(s.comms.rank, error)
    finally:
        s.comms.store = store  # the pool keeps its ranks
    return ended, [line.action for line in s.history if line.action], s.step


def test_lost_store_ends_run_for_new_workers(tmp_path):
    """Break the connection of one rank: all ranks end after the same step, and the next run resumes the checkpoint."""
    for ended, actions, step in get_pool(2).run(cut_off, tmp_path / "out", 1):
        assert (ended.kind, ended.exit_code, actions, step) == ("restart", 75, ["restart"], 5)
        assert "store-lost at rank 1: the connection to the job store is lost permanently (Broken pipe)" in ended.what
        assert "step-00000002 is the newest checkpoint" in ended.what
    assert [found[0] for found in get_pool(2).run(cut_off, tmp_path / "out", None)] == [0, 0]


def test_lost_store_at_last_save_requests_restart(tmp_path):
    for ended, actions, step in get_pool(2).run(cut_off, tmp_path / "out", 1, 4):
        assert (ended.kind, ended.exit_code, actions, step) == ("restart", 75, [], 4)
        assert "store-lost at rank 1: the connection to the job store is lost permanently (Broken pipe)" in ended.what
    assert read_ending(tmp_path / "out") is None  # the launcher writes the ending


def test_failed_save_without_lost_store_restarts_no_workers(tmp_path):
    """Continue after a failed save, because the disk may have space for a later save."""
    found = get_pool(2).run(cut_off, tmp_path / "out", 7)  # no rank has index 7
    assert all(actions == [] for _, actions, _ in found)


@pytest.mark.parametrize(("code", "requeue"), [(75, True), (3, False)])
def test_lost_store_without_restarts_left_requeues(tmp_path, code, requeue):
    failure = RankFailure(0, "restart", code, "store-lost at rank 0: Broken pipe")
    starts = Starts(tmp_path, LocalLaunch(futile_restarts=0), lambda ranks: (ranks, []), lambda text: None)
    assert starts.stop(Progress(2, 0, 0, futile=1, restarts=1), failure) == failure, "the budget counts it as any"
    Starts.end(tmp_path, 1, failure)
    ending = read_ending(tmp_path)
    assert (ending.exit_code, ending.requeue) == (code, requeue)


def test_node_cannot_join_ended_job(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "OVER_SECONDS", 0.2)
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    job = first.share()
    first.end_job()
    agent = RunDirectory(tmp_path)
    assert agent.share(waits=False) == job  # the agent of a command that already belongs to the job
    agent.unlock()
    with pytest.raises(UserError, match="the last node of a finished job"):
        second.share()
    monkeypatch.setattr(lock, "OVER_SECONDS", 60)
    leaves = threading.Timer(0.3, first.unlock)
    leaves.start()
    assert second.share() != job
    leaves.join()


def test_running_job_refuses_node_with_another_configuration(tmp_path):
    def run(steps):
        return build_default_run(run={"dir": str(tmp_path / "out"), "steps": steps})

    RunDirectory.create(run(10)).unlock()
    first, second = RunDirectory(tmp_path / "out"), RunDirectory(tmp_path / "out")
    first.go_on(run(20))
    with pytest.raises(
        UserError, match=r"another configuration .*: run\.steps is 20 in the directory and 30 in this command"
    ):
        second.go_on(run(30))
    second.go_on(run(20))
    assert first.run().job.steps == 20
    assert len(first.read_provenance()["starts"]) == 2
    second.put_back()
    first.put_back()
    assert first.run().job.steps == 20, "the other node goes on with it"


def test_refused_node_keeps_shared_run_directory(tmp_path):
    words = build_default_run(run={"dir": str(tmp_path / "out")})
    first, second = RunDirectory.meet(words), RunDirectory.meet(words)
    assert not first.discard()
    first.unlock()
    second.unlock()
    again = RunDirectory.meet(build_default_run(run={"dir": str(tmp_path / "other")}))
    assert again.discard()
    Starts.end(again.path, 1, RankFailure(0, "user", 2, "a mistake"))  # must not create the directory again
    assert not again.path.exists()


def test_non_object_event_line_is_skipped(tmp_path):
    (tmp_path / "events.jsonl").write_text("3\n[1]\n")
    events = Events(tmp_path)
    events.write("start")
    events.close()
    assert [line["event"] for line in read_events(tmp_path)] == ["start"]


def test_starting_agent_receives_pending_stop_signal(tmp_path, monkeypatch):
    found, popen = Agents(tmp_path, 2), subprocess.Popen
    found.again = {0: 0.0, 1: 0.0}

    def asked_meanwhile(command, **options):
        process = popen(["sleep", "600"])
        found._hand_on(signal.SIGTERM, None)
        return process

    monkeypatch.setattr(several.subprocess, "Popen", asked_meanwhile)
    found._start()
    (process,) = found.running.values()  # the second agent is not started
    try:
        assert process.wait(120) == -hand_on(signal.SIGTERM)
    finally:
        process.kill()


def test_environment_variable_resolves_conflict_between_parts(monkeypatch):
    parts = [
        (name, SimpleNamespace(get_environment=lambda run, name=name: {"WANTED": name})) for name in ("one", "two")
    ]
    run = SimpleNamespace(iterate_parts=lambda: parts)
    monkeypatch.delenv("WANTED", raising=False)
    (problem,) = _check_variables(run)
    assert "WANTED=two train ..." in str(problem)
    monkeypatch.setenv("WANTED", "two")
    assert not list(_check_variables(run))


def test_unquoted_number_in_text_option_is_accepted(tmp_path):
    """Edit config.yaml by hand so that the text option `run.name` is 7 instead of '7'."""
    run = build_default_run(run={"dir": str(tmp_path / "out"), "name": "7"})
    RunDirectory.create(run).unlock()
    first, second = RunDirectory(tmp_path / "out"), RunDirectory(tmp_path / "out")
    first.go_on(run)
    first.config.write_text(first.config.read_text().replace("name: '7'", "name: 7"))
    second.go_on(run)


def test_deleted_run_directory_is_reported(tmp_path):
    """Delete the directory before training, because its checkpoints could not be resumed without config.yaml."""
    s = open_session(tmp_path / "out", "run.steps=2", "checkpoint.every=1")
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=r"config\.yaml is missing: the run directory was deleted or moved") as told:
        train(s)
    assert "cannot be resumed" in str(told.value)
    assert len(s.checkpointer.list()) == 2
