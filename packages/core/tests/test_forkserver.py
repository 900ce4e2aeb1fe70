"""How the end of the fork server is told."""

from __future__ import annotations

import multiprocessing.forkserver
import signal
import subprocess

import pytest

from gangline.launch import forkserver


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    """A function (what a shell does) -> the process, which stands for the server."""
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


def test_a_server_that_has_closed_its_connections_and_is_not_gone_yet_is_waited_for(server) -> None:
    process = server("exec >&-; sleep 0.3; kill -9 $$")
    assert process.stdout.read() == b""
    assert forkserver.lost() == -signal.SIGKILL


def test_one_that_lives_is_not_lost(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_ENDS_SECONDS", 0.1)
    server("exec sleep 60")
    assert forkserver.lost() == 0
