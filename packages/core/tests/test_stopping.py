"""Ctrl-C, SIGTERM and kill -9: ranks end at a step boundary if possible, and none is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gangline.launch.signals import (
    ANSWER,
    SAME_REQUEST_SECONDS,
    STACKS,
    STOP,
    HandedOn,
    Requests,
    answer_signal,
    exit_code,
    find_asker,
    hand_on,
    stop_signals,
)
from gangline_basics.launch.failures import describe_end
from gangline_basics.launch.stops import take_requests
from gangline_testkit import warm, warm_client
from gangline_testkit.processes import find_living, kill, wait_until_none_lives

HERE = Path(__file__).parent
SAVING = 300.0  # seconds of a save, longer than the test may take
LATE = SAME_REQUEST_SECONDS + 0.5


class Started:
    """Process of `launched.py` in its own session, forked from a process that has loaded torch."""

    def __init__(self, run_dir: Path, world: int, target: str, args=(), **config) -> None:
        self.run_dir, self.world = run_dir, world
        run_dir.mkdir(exist_ok=True)
        before = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), *([before] if before else [])]),
        }
        words = [str(run_dir), str(world), target, json.dumps(args), json.dumps(config)]
        self.process = subprocess.Popen(
            [*warm.make_command("launched", environment), *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id of the forked `train`, whose exit code `self.process` returns."""
        return json.loads((self.run_dir / "train.json").read_text())["pid"]

    def wait_for(self, name: str, timeout: float = 240) -> None:
        deadline = time.monotonic() + timeout
        while len(list(self.run_dir.glob(f"{name}-*.json"))) < self.world:
            assert time.monotonic() < deadline, f"no {name} in {timeout} s"
            assert self.process.poll() is None, self.process.stdout.read()
            time.sleep(0.01)

    def end(self, timeout: float = 120) -> tuple[int, str]:
        """Wait until no process of the session is left, and return the exit code and the output."""
        printed, _ = self.process.communicate(timeout=timeout)
        wait_until_none_lives(self.pid)  # a process that loads a library handles signals only afterwards
        return self.process.returncode, printed


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Yield all processes that the tests signal, started together because their rendezvous takes most of the time."""
    asked = {
        "ctrl-c": ("steps", (LATE + 1.0,), {}),
        "sigterm": ("steps", (0.2,), {}),
        "all-sigterm": ("steps", (LATE + 1.0,), {}),
        "impatient": ("steps", (SAVING,), {}),
        "deaf": ("deaf", (), {"grace_seconds": 1.0}),
        "agent": ("steps", (), {}),
        "stopped": ("steps", (), {}),
    }
    root = tmp_path_factory.mktemp("running")
    started = {name: Started(root / name, 2, target, args, **more) for name, (target, args, more) in asked.items()}
    yield started
    for one in started.values():
        if one.process.poll() is None:
            kill(one.process)


def stop_all(one: Started, signum: signal.Signals) -> None:
    """Send a signal to every process, and delay the agent, which may forward the signal late on a busy machine."""
    os.kill(one.pid, signal.SIGSTOP)
    os.killpg(one.pid, signum)
    time.sleep(LATE)
    os.kill(one.pid, signal.SIGCONT)


def saved(run_dir: Path) -> tuple[str, int]:
    """Return the signal that ended the ranks, and the number of different last steps."""
    found = [json.loads((run_dir / f"saved-{rank}.json").read_text()) for rank in range(2)]
    return found[0]["signal"], len({rank["step"] for rank in found})


@pytest.mark.parametrize("asked", STOP, ids=lambda asked: asked.name)
def test_signal_and_forwarded_copy_count_as_one_request(asked, monkeypatch):
    clock = iter([0.0, 100.0, 100.5, 100.0 + SAME_REQUEST_SECONDS * 2])
    monkeypatch.setattr("gangline.launch.signals.time.monotonic", lambda: next(clock))
    requests = Requests()
    assert [requests.take(signum) for signum in (asked, hand_on(asked), hand_on(asked), hand_on(asked))] == [1, 0, 0, 2]
    assert find_asker(asked) == find_asker(hand_on(asked)) == asked
    assert exit_code(-hand_on(asked)) == exit_code(-asked) == 128 + asked


def test_real_time_signals_have_one_meaning_each():
    assert len({STACKS, ANSWER, *HandedOn} - {*signal.Signals}) == 2 + len(STOP)
    assert [*HandedOn] == [*warm_client.HANDED_ON]


@pytest.mark.parametrize("signum", [*STOP, *HandedOn, STACKS])
def test_answer_signal_refuses_reserved_signals(signum):
    before = signal.getsignal(signum)
    with pytest.raises(ValueError, match="is reserved: it requests"):
        answer_signal(signum, lambda: None)
    assert signal.getsignal(signum) == before


@pytest.mark.parametrize("ignored", [signal.SIGINT, signal.SIGHUP])
def test_stop_signals_exclude_initially_ignored_signals(ignored):
    assert stop_signals() == STOP
    before = signal.signal(ignored, signal.SIG_IGN)
    try:
        assert {*STOP} - {*stop_signals()} == {ignored}
        with take_requests():
            assert signal.getsignal(ignored) == signal.SIG_IGN
    finally:
        signal.signal(ignored, before)


def test_unnamed_signal_is_reported_by_number():
    assert describe_end(-HandedOn.SIGTERM) == f"it was killed by signal {HandedOn.SIGTERM:d}"
    assert describe_end(-signal.SIGTERM) == "it was killed by SIGTERM"


def test_ctrl_c_ends_ranks_at_step_boundary(running):
    one = running["ctrl-c"]
    one.wait_for("step")
    stop_all(one, signal.SIGINT)
    code, printed = one.end()
    assert (code, saved(one.run_dir)) == (130, ("SIGINT", 1)), printed
    assert "Traceback" not in printed


def test_sigterm_to_train_ends_ranks_at_boundary(running):
    one = running["sigterm"]
    one.wait_for("step")
    os.kill(one.pid, signal.SIGTERM)
    code, printed = one.end()
    assert (code, saved(one.run_dir)) == (143, ("SIGTERM", 1)), printed
    assert "Traceback" not in printed


def test_sigterm_to_all_processes_ends_at_boundary(running):
    one = running["all-sigterm"]
    one.wait_for("step")
    stop_all(one, signal.SIGTERM)
    code, printed = one.end()
    assert (code, saved(one.run_dir)) == (143, ("SIGTERM", 1)), printed
    assert "Traceback" not in printed


def test_second_ctrl_c_ends_ranks_at_once(running):
    one = running["impatient"]
    one.wait_for("step")
    os.killpg(one.pid, signal.SIGINT)
    one.wait_for("heard")
    time.sleep(SAME_REQUEST_SECONDS + 0.1)
    os.killpg(one.pid, signal.SIGINT)
    code, printed = one.end(timeout=SAVING / 2)
    assert code == 130, printed
    assert not list(one.run_dir.glob("saved-*"))


def test_unresponsive_ranks_are_killed_after_grace_period(running):
    one = running["deaf"]
    one.wait_for("step")
    os.kill(one.pid, signal.SIGTERM)
    began = time.monotonic()
    code, printed = one.end()
    assert code == 143, printed
    assert time.monotonic() - began > 0.9
    assert (one.run_dir / "grace").read_text().split()[0] == "1", "seconds; torch's own are 30"


def test_ranks_end_with_killed_train(running):
    one = running["agent"]
    one.wait_for("step")
    os.kill(one.pid, signal.SIGKILL)
    code, _ = one.end()
    assert code == -signal.SIGKILL


def test_sigstopped_rank_ends_with_killed_train(running):
    """Stop a rank by SIGSTOP: the rank cannot end by itself and would keep its memory, also on a GPU."""
    one = running["stopped"]
    one.wait_for("step")
    rank = json.loads((one.run_dir / "step-1.json").read_text())["pid"]
    assert rank in find_living(one.pid)
    os.kill(rank, signal.SIGSTOP)
    os.kill(one.pid, signal.SIGKILL)
    code, _ = one.end()
    assert code == -signal.SIGKILL


def wait_for_the_server(parent: int) -> None:
    """Return once the fork server watches its parent: the server sets this alarm before it loads torch.

    Before that the server is a starting Python, which prints the usual traceback on Ctrl-C.
    """
    deadline = time.monotonic() + 60
    while not any(catches(pid, signal.SIGALRM) for pid in find_living(parent) if pid != parent):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def catches(pid: int, signum: signal.Signals) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_loading_fork_server_ends_with_parent(name):
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # background jobs ignore SIGINT
    code += "; from gangline_basics.launch import forkserver; forkserver.warm(); print('warm', flush=True); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout.readline() == "warm\n"
    wait_for_the_server(parent.pid)
    os.killpg(parent.pid, signal.Signals[name]) if name == "SIGINT" else parent.send_signal(signal.Signals[name])
    wait_until_none_lives(parent.pid, 120)
    assert "multiprocessing" not in parent.stdout.read()
