"""Agent that is forked from the fork server of its ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CODE = """
import sys
from gangline.config.defaults import build_default_run
from gangline_basics.launch import forkserver
from gangline_launch.forked import fork_agent
"""
RANKS = """
forkserver.PRELOAD = forkserver.PRELOAD[:4]
"""
# An agent without ranks needs no torch: the module `slow_to_load` takes loading time, but no CPU time.
NO_RANKS = """
import gangline_launch.forked as forked
forked.OF_AN_AGENT, forkserver.list_modules = (), lambda run: set()
forkserver.PRELOAD = (forkserver.PRELOAD[0], "slow_to_load")
"""
FORK = """
sys.exit(fork_agent("forked_agent:" + sys.argv[1], (sys.argv[2],), build_default_run()))
"""


def started(run_dir: Path, what: str, before: str = "", loads: str = NO_RANKS) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", before + CODE + loads + FORK, what, str(run_dir)],
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> dict:
    deadline = time.monotonic() + 180
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return json.loads(path.read_text())


def gone(pid: int, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


def test_agent_and_ranks_fork_from_one_server(tmp_path):
    process = started(tmp_path, "reduces", loads=RANKS)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    agent = json.loads((tmp_path / "agent-0.json").read_text())
    ranks = [json.loads((tmp_path / f"reduce-{rank}.json").read_text()) for rank in range(2)]
    assert [rank["sum"] for rank in ranks] == [3, 3]
    assert {rank["server"] for rank in ranks} == {agent["server"]}
    assert agent["group"] == agent["pid"] != process.pid  # signals to the command's group do not reach the agent


def test_agent_exit_code_is_returned(tmp_path):
    for what, code in (("seven", 7), ("killed", 128 + signal.SIGKILL)):
        process = started(tmp_path, what)
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == code, printed


def test_early_sigusr1_does_not_end_agent(tmp_path):
    process = started(tmp_path, "waits")
    for _ in range(20):  # while the server loads, and after the agent has begun
        if (tmp_path / "wait-0.json").exists():
            break
        time.sleep(0.1)
        if Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text():  # its signal handlers are set
            os.killpg(process.pid, signal.SIGUSR1)
    wait_for(tmp_path / "wait-0.json", process)
    os.kill(process.pid, signal.SIGTERM)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 15, printed  # exit code of the agent's own handler


EARLY = """
import os, signal, gangline_launch.forked as forked
wait = forked._wait
def stopped(ready):
    os.kill(os.getpid(), signal.SIGTERM)
    wait(ready)
forked._wait = stopped
"""
INSIDE = """
import multiprocessing.context as context, os, signal
start = context.ForkServerProcess.start
def stopped(self):
    start(self)
    os.kill(os.getpid(), signal.SIGTERM)
context.ForkServerProcess.start = stopped
"""


@pytest.mark.parametrize("before", [EARLY, INSIDE], ids=["before it is ready", "as it is started"])
def test_sigterm_during_agent_start_ends_agent(tmp_path, before):
    """Send SIGTERM while the agent starts: the command ends, and does not wait for the complete job."""
    process = started(tmp_path, "waits", before)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode in (15, 128 + signal.SIGTERM), printed
    assert "Traceback" not in printed


def test_agent_without_parent_exits_without_traceback(tmp_path):
    code = """
import multiprocessing, sys
from gangline_launch import forked
ready, tell = multiprocessing.Pipe(duplex=False)
ready.close()
forked._enter("forked_agent:seven", (".",), 0, set(), tell)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, start_new_session=False)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGTERM, "")


@pytest.mark.parametrize("early", [True, False], ids=["while the server loads", "later"])
def test_agent_ends_after_command_is_killed(tmp_path, early):
    process = started(tmp_path, "waits")
    if early:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=120)  # returns when the server, which holds the other end of the pipe, has ended
    else:
        pid = wait_for(tmp_path / "wait-0.json", process)["pid"]
        os.kill(process.pid, signal.SIGKILL)
        assert gone(pid)
        process.communicate(timeout=120)


def test_killed_fork_server_is_reported(tmp_path):
    process = started(tmp_path, "starts_after_the_server", loads=RANKS)
    os.kill(wait_for(tmp_path / "agent-0.json", process)["server"], signal.SIGKILL)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 1, printed
    assert "the fork server, which starts the ranks, is gone: it was killed by SIGKILL" in printed
    assert "Traceback" not in printed
