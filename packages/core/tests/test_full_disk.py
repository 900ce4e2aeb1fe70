"""Full disk in the run directory: failures and output that cannot be written are still reported."""

from __future__ import annotations

import io
import logging
import os
import resource

import pytest

from gangline.run.events import Events, read_events
from gangline_basics.launch import failures, worker
from gangline_basics.launch.agent_log import AgentLog
from gangline_basics.launch.failures import RankFailure
from gangline_basics.launch.rank_log import Copied

FULL = "/dev/full"


def test_failure_record_is_kept_in_memory_if_unwritable(tmp_path, capsys):
    logs = tmp_path / "logs"
    logs.write_text("no file can be made here")
    with open(FULL, "w") as log:
        error = failures.RankFailure(0, "user", 2, "no room", ["Make room."]).make_error()
        assert worker._record_failure(error, 0, logs, 1, log) == 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), log.fileno())
    assert capsys.readouterr().err == "train: no room\n  Make room.\n"
    assert failures.find_first(logs, 1).what == "no room"
    failures.claim(logs, 1, RankFailure(0, "ended", 2))
    assert failures.find_first(logs, 1).what == "no room", "the first one stays"
    failures.clear(logs)
    assert failures.find_first(logs, 1) is None


def test_output_reaches_terminal_if_log_disk_is_full():
    terminal = io.StringIO()
    with open(FULL, "w", buffering=1) as log:
        stream = Copied(terminal, log)
        print("train: no room", file=stream)
        os.dup2(os.open(os.devnull, os.O_WRONLY), log.fileno())
    assert terminal.getvalue() == "train: no room\n"


@pytest.mark.parametrize("place", ["no room", "a device"])
def test_agent_log_on_full_disk_prints_nothing(tmp_path, capsys, place):
    handler = AgentLog(tmp_path / "agent.log" if place == "no room" else FULL, delay=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        handler.emit(logging.LogRecord("torch", logging.ERROR, "", 0, "failed", (), None))
        handler.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err == ""


def test_agent_log_does_not_follow_link(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "agent.log").symlink_to("thesis.txt")
    handler = AgentLog(tmp_path / "agent.log", delay=True)
    handler.emit(logging.LogRecord("torch", logging.ERROR, "", 0, "failed", (), None))
    handler.close()
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_events_continue_when_truncated_line_remains(tmp_path, monkeypatch):
    (tmp_path / "events.jsonl").write_text('{"event": "to')

    def full(file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("gangline.run.events.end_line", full)
        events = Events(tmp_path)
    events.write("launch")
    events.write("exit")
    events.close()
    assert [line["event"] for line in read_events(tmp_path)] == ["launch", "exit"]
