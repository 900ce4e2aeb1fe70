"""`RealRuns`: error output of real runs in tests, and no processes left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from gangline_testkit import RealRuns
from gangline_testkit.processes import find_children, find_living, kill, wait_until_none_lives

SLEEPER = "import subprocess, sys; subprocess.Popen(['sleep', '1000']); print(flush=True); sys.stdin.read()"


def test_unexpected_exit_code_shows_the_output(runs):
    with pytest.raises(AssertionError, match=r"exit code 2, expected 0; output:\n.*there is no option no\.such"):
        runs.train("no.such=1")
    assert "no.such" in runs.expect_refusal("no.such=1")


def test_wait_for_step_fails_when_run_ends(runs):
    with pytest.raises(AssertionError, match=r"ended before step 1; output:\n.*there is no option no\.such"):
        runs.wait_for_step(runs.fork("no.such=1", "run.dir=out"), "out", 1)


def test_second_use_of_a_directory_is_refused(runs):
    with pytest.raises(ValueError, match="another RealRuns uses"):
        RealRuns(runs.directory)


def test_agent_variables_do_not_reach_runs(runs, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    runs.environment["HERE"] = "1"
    runs.train("--help", prefix=["sh", "-c", 'env > seen; "$@"', "sh"], THERE="2")
    seen = (runs.directory / "seen").read_text().splitlines()
    assert {"HERE=1", "THERE=2", "OMP_NUM_THREADS=1"} < set(seen)
    assert not [line for line in seen if line.startswith(("WORLD_SIZE", "TORCHELASTIC"))]


def test_default_settings_do_not_apply_to_resumed_runs(runs):
    """Check that `resume=` is passed without default settings: a resumed run has its own."""
    assert "dim: 32" in runs.train("--cfg", "job")
    assert "there is no run directory" in runs.expect_refusal("resume=absent")


@pytest.fixture
def sleeper():
    """Start a process in a new session, with a child process `sleep`."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    process.stdout.readline()
    yield process
    kill(process)


def test_find_living_lists_processes_and_parents(sleeper):
    while not all(command for command in find_children(sleeper.pid).values()):
        time.sleep(0.01)  # the child is forked, but does not run `sleep` yet
    ((child, command),) = find_children(sleeper.pid).items()
    assert command.split() == ["sleep", "1000"]
    found = find_living(sleeper.pid)
    assert set(found) == {sleeper.pid, child}
    assert found[child].parent == sleeper.pid
    assert found[sleeper.pid].parent == os.getpid()
    with pytest.raises(AssertionError, match=r"still alive after 0 s: .*sleep 1000"):
        wait_until_none_lives(sleeper.pid, 0)
    kill(sleeper)
    wait_until_none_lives(sleeper.pid)


def test_running_processes_end_with_the_block(tmp_path):
    with RealRuns(tmp_path) as runs:
        started = runs.start("run.dir=out", "run.steps=100000")
    assert started.returncode is not None
    wait_until_none_lives(started.pid)
