"""Monitoring of a live run: `gangline health watch`, alerts by webhook and command, OpenMetrics endpoint."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from gangline import UserError
from gangline.config.check import check
from gangline.launch.guard import read_birth
from gangline.run.directory import RunDirectory
from gangline.run.events import read_events
from gangline_health.commands import watch
from gangline_health.live import alerts, serve
from gangline_health.live.alerts import Alerts, is_worth_sending, send
from gangline_health.live.follow import Follower
from gangline_health.live.openmetrics import GAUGES, RunCollector
from gangline_testkit.ports import free_port
from gangline_testkit.real_runs import RealRuns
from gangline_testkit.runs import build_small_run

WARNS = {"event": "verdict", "kind": "straggler", "where": "rank 3", "suggestion": "warn", "evidence": 'a "slow" one'}


def wait_for(condition, seconds: float = 120.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.05)
    return found


def written(run_dir: Path, *events: dict, records: tuple[dict, ...] = ()) -> Path:
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    for name, lines in (("events.jsonl", events), ("metrics.jsonl", records)):
        with (run_dir / name).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return run_dir


def test_follower_returns_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    follower = Follower(path)
    assert follower.read_lines() == []
    path.write_text('{"a": 1}\nnonsense\n{"a": ')
    assert follower.read_lines() == [{"a": 1}]
    with path.open("a") as file:
        file.write("2}\n")
    assert follower.read_lines() == [{"a": 2}]
    assert Follower(path, follower.offset).read_lines() == []


def test_follower_refuses_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lines")
    with pytest.raises(UserError, match="lines is a named pipe, not a regular file"):
        Follower(tmp_path / "lines").read_lines()


# --- metrics ---------------------------------------------------------------------------------------------------------


def parsed(exposition: str) -> dict[tuple[str, ...], float]:
    """Return the samples by family and label values, with labels sorted by name.

    The parser of the format's authors rejects a missing end mark, a sample without family, a counter without suffix.
    """
    assert exposition.endswith("\n# EOF\n")
    families = list(text_string_to_metric_families(exposition))
    assert {family.type for family in families} == {"gauge", "counter"}
    return {
        (family.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def text_of(run_dir: Path) -> str:
    registry = CollectorRegistry()
    registry.register(RunCollector(run_dir))
    return generate_latest(registry).decode()


def test_metrics_are_openmetrics_text(tmp_path: Path) -> None:
    phases = {"data": [0.1, 0.2], "backward": [0.5, 0.7]}
    record = {
        "step": 7,
        "loss": "nan",
        "step_seconds": 0.5,
        "time": time.time() - 3,
        "rank_phases": phases,
        "mfu": None,
        "rank_mfu": [0.5, 0.25],
    }
    written(tmp_path, WARNS, WARNS, {"event": "response", "action": "roll_back"}, records=(record,))
    written_down = text_of(tmp_path)
    found, run = parsed(written_down), tmp_path.name
    assert found["gangline_step", run] == 7
    assert str(found["gangline_loss", run]) == "nan"
    assert found["gangline_verdicts", "straggler", run] == 2
    assert found["gangline_responses", "roll_back", run] == 1
    assert found["gangline_rank_phase_seconds", "backward", "1", run] == 0.7
    assert found["gangline_rank_mfu_ratio", "1", run] == 0.25
    assert 2 < found["gangline_quiet_seconds", run] < 60
    assert ("gangline_mfu_ratio", run) not in found
    assert f'\ngangline_verdicts_total{{kind="straggler",run="{run}"}} 2.0\n' in written_down


def test_prometheus_metric_names_are_stable(tmp_path: Path) -> None:
    """Check the set of names, because dashboards refer to these names."""
    record = dict.fromkeys(GAUGES, 1.0) | {"step": 1, "time": time.time(), "rank_mfu": [0.5]}
    written(tmp_path, records=(record | {"rank_phases": {"data": [0.1]}},))
    names = {family.name for family in text_string_to_metric_families(text_of(tmp_path))}
    of_run = (
        "quiet_seconds",
        "ranks_here",
        "rank_phase_seconds",
        "rank_mfu_ratio",
        "launches",
        "verdicts",
        "responses",
    )
    assert names == {name for name, _ in GAUGES.values()} | {f"gangline_{name}" for name in of_run}


def test_metrics_are_served_and_follow_the_run(tmp_path: Path) -> None:
    written(tmp_path, records=({"step": 1, "loss": 2.0},))
    with serve.MetricsServer(tmp_path, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_address[1]}"
        for step in (1, 2):
            with urllib.request.urlopen(f"{place}/metrics") as answer:
                assert answer.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
                assert parsed(answer.read().decode())["gangline_step", tmp_path.name] == step
            written(tmp_path, records=({"step": step + 1, "loss": 2.0},))
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{place}/etc/passwd")
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(f"{place}/metrics", data=b"posted")
        asked = urllib.request.Request(f"{place}/metrics", headers={"Accept": "application/openmetrics-text;version=x"})
        with urllib.request.urlopen(asked) as answer:
            assert "version=x" not in answer.headers["Content-Type"]
        server.shutdown()


def test_metrics_port_without_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    check(build_small_run("health=[monitors]", "model.vocab_size=256"))
    with pytest.raises(UserError, match=r"pip install 'gangline-health\[metrics\]'"):
        check(build_small_run("health=[monitors]", "model.vocab_size=256", "health.monitors.metrics_port=9100"))


def test_occupied_metrics_port_does_not_end_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    written(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        monkeypatch.setattr(serve.MetricsServer, "allow_reuse_address", False)
        serve.main(str(tmp_path), "127.0.0.1", other.server_address[1])
    (said,) = read_events(tmp_path)
    assert said["kind"] == "no-metrics"
    assert "the run continues without metrics" in said["evidence"]


# --- alerts ----------------------------------------------------------------------------------------------------------


class Hook(BaseHTTPRequestHandler):
    """HTTP handler that stores posted JSON in `got`, and answers with status `code`."""

    got: list[dict]
    code = 200

    def do_POST(self) -> None:
        self.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Drop the access log."""


@pytest.fixture
def hook() -> Iterator[str]:
    Hook.got, Hook.code = [], 200
    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/alert"
        server.shutdown()


def test_webhook_gets_each_event_once_across_restarts(tmp_path: Path, hook: str) -> None:
    note = {**WARNS, "suggestion": "note"}
    written(tmp_path, WARNS, note, {"event": "phase"}, {"event": "launch", "why": "rank"})
    Alerts(tmp_path, hook).look()
    assert [line["event"] for line in Hook.got] == ["verdict", "launch"]
    assert Hook.got[0]["run_dir"] == str(tmp_path)
    Alerts(tmp_path, hook).look()
    assert len(Hook.got) == 2
    written(tmp_path, {"event": "exit", "exit_code": 3})
    Alerts(tmp_path, hook).look()
    assert Hook.got[2]["exit_code"] == 3


def test_failed_alert_is_reported_once(tmp_path: Path, hook: str) -> None:
    Hook.code = 500
    written(tmp_path, WARNS)
    one = Alerts(tmp_path, hook)
    one.look()
    for _ in range(3):
        written(tmp_path, WARNS)
        one.look()
    (said,) = [line for line in read_events(tmp_path) if line.get("kind") == "alert-lost"]
    assert "500" in said["evidence"]
    assert not is_worth_sending(said), "what alerts say of themselves is no alert"


def test_alert_command_gets_json_and_reports_failure(tmp_path: Path) -> None:
    assert send(f"cat > {tmp_path}/got", WARNS) == ""
    assert json.loads((tmp_path / "got").read_text()) == WARNS
    assert send("echo lost >&2; exit 3", WARNS) == "exit code 3: lost"
    assert send("exec sleep 60", WARNS, seconds=0.1) == "no answer within 0.1 s"
    assert "refused" in send(f"http://127.0.0.1:{free_port()}", WARNS)


def test_alert_command_is_hidden_from_process_arguments(tmp_path: Path) -> None:
    """Check the arguments of the shell, which other users can read, because the command may contain a secret."""
    assert send(f"tr '\\0' ' ' < /proc/$$/cmdline > {tmp_path}/arguments; : 'sk-\"live'", WARNS) == ""
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith("/bin/sh -c ")
    assert "live" not in arguments


@pytest.mark.parametrize("end", ["its own", "the job's"])
def test_hung_alert_command_leaves_no_process(tmp_path: Path, end: str) -> None:
    """Check that `send` returns, and child processes of the shell end, at the timeout or at the end of the job."""
    told = tmp_path / "child"
    began, command = time.monotonic(), f"sleep 900 & echo $! > {tmp_path}/new; mv {tmp_path}/new {told}; wait"
    if end == "its own":
        why = send(command, WARNS, seconds=2.0)
    else:
        why = send(command, WARNS, seconds=600.0, until=lambda: began if told.exists() else math.inf)
    assert "no answer within" in why
    assert time.monotonic() - began < 300.0
    child = int(told.read_text())
    while read_birth(child) is not None:
        assert time.monotonic() - began < 400.0
        time.sleep(0.05)
    assert send("true", WARNS, until=lambda: 0.0) == "the job ended before the alert was sent"


@pytest.mark.parametrize("url", ["http://host:abc/", "http://[bad", "http:///path", "http://a b/", "ftp://host/x"])
def test_invalid_alert_url_is_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"health.monitors.alert is not a valid http or https URL"):
        check(build_small_run("health=[monitors]", f"health.monitors.alert='{url}'"))
    assert send(url, WARNS) != ""


def test_events_before_first_alert_are_not_sent(tmp_path: Path, hook: str) -> None:
    now = datetime.now(UTC)
    old, new = ({**WARNS, "time": (now + timedelta(seconds=late)).isoformat()} for late in (-60, 1))
    written(tmp_path, old, old, {**new, "kind": "hang"})
    Alerts(tmp_path, hook, now.timestamp()).look()
    assert [line["kind"] for line in Hook.got] == ["hang"]
    written(tmp_path, new)
    Alerts(tmp_path, hook, now.timestamp() + 1000).look()
    assert len(Hook.got) == 2, "from where an earlier one had come to"


def test_alert_sent_before_interrupt_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    def send_one(target: str, line: dict, **_: object) -> str:
        if len(sent) == 1:
            raise KeyboardInterrupt
        sent.append(line["where"])
        return ""

    written(tmp_path, WARNS, {**WARNS, "where": "rank 4"})
    monkeypatch.setattr(alerts, "send", send_one)
    with pytest.raises(KeyboardInterrupt):
        Alerts(tmp_path, "true").look()
    monkeypatch.setattr(alerts, "send", lambda target, line, **_: sent.append(line["where"]) or "")
    Alerts(tmp_path, "true").look()
    assert sent == ["rank 3", "rank 4"]


def test_alerts_are_sent_without_file_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    written(tmp_path)
    monkeypatch.setattr(fcntl, "flock", fails)
    assert alerts.wait_for_lock(tmp_path, threading.Event())
    (said,) = read_events(tmp_path)
    assert (said["kind"], said["suggestion"]) == ("alert-lock", "note")
    assert "No locks available" in said["evidence"]


def test_webhook_secret_is_never_written(
    tmp_path: Path, hook: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = f"{hook}/T0-very-secret"
    for literal in (secret, f"curl -d @- {secret}", "http://me:word@host"):
        with pytest.raises(UserError, match=r"health.monitors.alert contains a secret"):
            check(build_small_run("health=[monitors]", f"health.monitors.alert='{literal}'"))
    check(build_small_run("health=[monitors]", "model.vocab_size=256", "health.monitors.alert='sh alert.sh'"))
    monkeypatch.setenv("HOOK", secret)
    words = ("model.vocab_size=256", "health.monitors.alert=${oc.env:HOOK}", f"run.dir={tmp_path}/out")
    run = build_small_run("health=[monitors]", *words)
    check(run)
    arguments = json.dumps([one.args for _, part in run.iterate_parts() for one in part.list_sidecars(run)])
    RunDirectory.create(run).unlock()
    out = tmp_path / "out"
    assert alerts.read_target(str(out)) == secret
    Hook.code = 500
    written(out, WARNS)
    Alerts(out, secret).look()
    assert len(Hook.got) == 1
    written_down = "".join(file.read_text() for file in out.rglob("*") if file.is_file())
    assert "http://127.0.0.1" in written_down
    assert "very-secret" not in written_down + arguments + "".join(capsys.readouterr())


@contextmanager
def speaks(*words: bytes, pause: float = 0.0) -> Iterator[str]:
    """Yield the URL of a server that sends `words`, with a pause of `pause` seconds before each word but the first."""

    class Speaks(StreamRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            with suppress(OSError):
                for number, word in enumerate(words):
                    time.sleep(pause * bool(number))
                    self.request.sendall(word)

    with ThreadingTCPServer(("127.0.0.1", 0), Speaks) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/secret-path"
        server.shutdown()


def test_malformed_or_endless_http_answer_is_reported() -> None:
    with speaks(b"SSH-2.0-OpenSSH\r\n") as url:
        assert send(url, WARNS) == "BadStatusLine"
    with speaks(b"") as url:
        assert "closed connection" in send(url, WARNS)
    with speaks(b"HTTP/1.1 200 OK\r\n", *[b"X: y\r\n"] * 3000, pause=0.2) as url:
        begun = time.monotonic()
        assert send(url, WARNS, seconds=1.0) == "no answer within 1 s"
        assert time.monotonic() - begun < 300, "all of it takes ten minutes"


# --- watch command and complete runs ----------------------------------------------------------------------------------


def test_watch_refuses_a_directory_without_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        watch.run([str(tmp_path / "nothing"), "--once"])


def test_live_run_is_watched_scraped_and_alerted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check an alert command that takes longer than many steps, and must not delay any step."""
    command = tmp_path / "alert.sh"
    command.write_text(f"cat >> {tmp_path}/told; echo >> {tmp_path}/told; exec sleep 8\n")
    with RealRuns(tmp_path) as runs:
        port = free_port()
        words = (
            "parallel=ddp",
            "launch.processes=2",
            "run.steps=100000",
            "checkpoint.every=20",
            "health=[monitors,chaos]",
        )
        options = (
            f"health.monitors.metrics_port={port}",
            f"health.monitors.alert=sh {command}",
            "health.chaos.at=[nan@20:1]",
        )
        run = runs.fork("run.dir=out", *words, *options)
        runs.wait_for_step(run, "out", 60)
        scraped = parsed(wait_for(lambda: scrape(port)))
        of = {name: value for (name, *_), value in scraped.items()}
        assert of["gangline_step"] >= 20
        assert of["gangline_ranks_here"] == 2
        told = tmp_path / "told"
        (first, *_) = wait_for(lambda: told.exists() and told.read_text().splitlines())
        assert json.loads(first)["kind"] == "not-finite"
        done = runs.read_records("out")[-1]["step"]
        wait_for(lambda: runs.read_records("out")[-1]["step"] > done + 5, seconds=60)
        assert watch.run([str(tmp_path / "out"), "--once"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "2 of 2 ranks are on this machine" in shown
        assert "last checkpoint: step-0" in shown
        assert "not-finite at step 20" in shown


def scrape(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return answer.read().decode()
    except OSError:
        return ""
