"""Fork server: detection of its exit, and errors of its socket, shared memory and resource tracker."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gangline_basics.launch import forkserver


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    """Function that starts a shell command in place of the fork server, and returns its process."""
    started: list[subprocess.Popen] = []

    def start(does: str) -> subprocess.Popen:
        started.append(subprocess.Popen(["sh", "-c", does], stdout=subprocess.PIPE))
        monkeypatch.setattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", started[0].pid)
        return started[0]

    monkeypatch.setattr(forkserver, "_adopted", 0)
    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_exit_code_is_awaited_after_server_closes_pipe(server) -> None:
    process = server("exec >&-; sleep 0.3; kill -9 $$")
    assert process.stdout.read() == b""
    assert forkserver.read_exit() == -signal.SIGKILL


def test_running_server_is_not_reported_lost(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_ENDS_SECONDS", 0.1)
    server("exec sleep 60")
    assert forkserver.read_exit() == 0


WARM = [sys.executable, "-c", "from gangline_basics.launch import forkserver; forkserver.warm(); forkserver.drop()"]


def test_temporary_directory_too_long_for_socket_is_reported(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 200)
    deep.mkdir()
    done = subprocess.run(WARM, env={**os.environ, "TMPDIR": str(deep)}, capture_output=True, text=True)
    assert f"UserError: a socket cannot be created in {deep}: AF_UNIX path too long.\n" in done.stderr
    assert "TMPDIR=/tmp train ..." in done.stderr


def test_read_only_shared_memory_is_reported() -> None:
    private = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o ro tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*private, "true"], capture_output=True).returncode:
        pytest.skip("no mount of its own can be made here")
    done = subprocess.run([*private, *WARM], capture_output=True, text=True)
    assert "UserError: a semaphore cannot be created in /dev/shm: Read-only file system.\n" in done.stderr


def test_resource_tracker_ignores_sighup_of_terminal():
    code = """
import os, signal
from multiprocessing import resource_tracker
from gangline_basics.launch.forkserver import start_tracker
start_tracker()
pid = resource_tracker._resource_tracker._pid
os.kill(pid, signal.SIGHUP)
print(signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print(*(int(line.split()[1], 16) & 1 for line in open(f"/proc/{pid}/status") if line.startswith("SigBlk")))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert found == ["False", "1"]
