"""How a job of several agents ends where its ranks, or the agents themselves, could not say so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from gangline import run_lock
from gangline.config import default_run
from gangline.config.check import _variables
from gangline.ending import RunEnding, read_ending, write_ending
from gangline.errors import UserError
from gangline.events import Events, read_events
from gangline.launch import failures, several
from gangline.launch.failures import RankFailure
from gangline.launch.several import Agents
from gangline.launch.starts import Starts
from gangline.rundir import RunDirectory

DONE = RunEnding(generation=1, reason="done", exit_code=0, evidence="step 5 is done")


@pytest.mark.parametrize("before", [None, DONE])
def test_agents_that_fail_before_they_meet_are_heard(tmp_path, capfd, before):
    """Here there is no run in the directory; what an earlier job left is no ending of this one."""
    if before is not None:
        write_ending(tmp_path, before)
    assert Agents(tmp_path, 1).watch() == 2
    assert "is no run directory, or was only half-written" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("code", "reason", "requeue"), [(3, "verdict", False), (75, "preempted", True), (1, "bug", True)]
)
def test_ranks_that_ended_say_how_by_their_exit_code(tmp_path, code, reason, requeue):
    """Rank 0 was killed before it wrote the ending."""
    Starts.end(tmp_path, 2, RankFailure(1, "ended", code))
    ending = read_ending(tmp_path)
    assert (ending.reason, ending.requeue, ending.exit_code) == (reason, requeue, code)


@pytest.mark.parametrize(("code", "goes_on"), [(75, True), (3, False)])
def test_under_a_foreign_agent_ranks_that_saved_start_again(tmp_path, code, goes_on):
    (tmp_path / "logs").mkdir()
    failures.claim(tmp_path / "logs", 1, RankFailure(0, "ended", code))
    program = "import sys; from gangline.launch.worker import main; sys.exit(main(sys.argv[1], 'builtins:len'))"
    environment = {**os.environ, "TORCHELASTIC_RESTART_COUNT": "1", "RANK": "0", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, timeout=120)
    assert ended.returncode == (len(str(tmp_path)) % 256 if goes_on else code)


def test_a_job_that_is_over_is_not_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "OVER_SECONDS", 0.2)
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    job = first.share()
    first.job_is_over()
    agent = RunDirectory(tmp_path)
    assert agent.share(waits=False) == job  # of a command that is in it
    agent.unlock()
    with pytest.raises(UserError, match="the last node of a job that is over"):
        second.share()
    monkeypatch.setattr(run_lock, "OVER_SECONDS", 60)
    leaves = threading.Timer(0.3, first.unlock)
    leaves.start()
    assert second.share() != job
    leaves.join()


def test_a_live_job_keeps_its_configuration(tmp_path):
    def run(steps):
        return default_run(run={"dir": str(tmp_path / "out"), "steps": steps})

    RunDirectory.create(run(10)).unlock()
    first, second = RunDirectory(tmp_path / "out"), RunDirectory(tmp_path / "out")
    first.go_on(run(20))
    with pytest.raises(UserError, match=r"another configuration: run\.steps is 20 there, and 30 here"):
        second.go_on(run(30))
    second.go_on(run(20))
    assert first.run().run.steps == 20
    assert len(first.read_provenance()["starts"]) == 2
    second.put_back()
    first.put_back()
    assert first.run().run.steps == 20, "the other node goes on with it"


def test_who_is_refused_takes_no_directory_away_from_another_node(tmp_path):
    words = default_run(run={"dir": str(tmp_path / "out")})
    first, second = RunDirectory.meet(words), RunDirectory.meet(words)
    assert not first.discard()
    first.unlock()
    second.unlock()
    again = RunDirectory.meet(default_run(run={"dir": str(tmp_path / "other")}))
    assert again.discard()
    Starts.end(again.path, 1, RankFailure(0, "user", 2, "a mistake"))  # another node that had begun to say why
    assert not again.path.exists()


def test_a_line_of_events_that_is_no_object_is_left_out(tmp_path):
    (tmp_path / "events.jsonl").write_text("3\n[1]\n")
    events = Events(tmp_path)
    events.write("start")
    events.close()
    assert [line["event"] for line in read_events(tmp_path)] == ["start"]


def test_an_agent_that_starts_as_the_job_is_asked_to_stop_hears_of_it(tmp_path, monkeypatch):
    found, popen = Agents(tmp_path, 2), subprocess.Popen
    found.again = {0: 0.0, 1: 0.0}

    def asked_meanwhile(command, **options):
        process = popen(["sleep", "600"])
        found._hand_on(signal.SIGTERM, None)
        return process

    monkeypatch.setattr(several.subprocess, "Popen", asked_meanwhile)
    found._start()
    (process,) = found.running.values()  # the other one is not started any more
    try:
        assert process.wait(120) == -signal.SIGTERM
    finally:
        process.kill()


def test_the_user_settles_what_two_parts_want_of_one_variable(monkeypatch):
    parts = [(name, SimpleNamespace(environment=lambda run, name=name: {"WANTED": name})) for name in ("one", "two")]
    run = SimpleNamespace(parts=lambda: parts)
    monkeypatch.delenv("WANTED", raising=False)
    (problem,) = _variables(run)
    assert "WANTED=two train ..." in str(problem)
    monkeypatch.setenv("WANTED", "two")
    assert not list(_variables(run))
