"""Alert sidecar: sends verdicts above a note, responses and failures to a shell command or a webhook. Torch-free.

The sidecar is a process that reads events.jsonl, so no step waits for an answer. On several machines, one sidecar sends
at a time; if that sidecar is lost, another one continues at its offset.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from gangline import UserError
from gangline.health import Action, Verdict
from gangline.run.directory import RunDirectory
from gangline.run.events import Events
from gangline.storage.files import lock_handle, open_lock, read_regular, write_whole
from gangline_health.live.follow import Follower
from gangline_health.live.target import is_url, name_target

INTERVAL = 0.5  # seconds between two reads of events.jsonl
SECONDS = 10.0  # timeout of one alert in seconds
LAST_SECONDS = 7.0  # timeout of all alerts at the end of the job, in seconds: shorter than the sidecar's grace period
SLICE = 0.2  # seconds between two checks for the end of the job while an alert is being sent
COMMAND = "GANGLINE_ALERT"  # environment variable that passes the alert command to the shell
# writers of events that send their own alerts; the hang watcher sends its alert before it kills a rank
SENT_BY_THEMSELVES = ("alert", "watcher")

Line = dict[str, Any]


def send(target: str, content: Line, seconds: float = SECONDS, until: Callable[[], float] = lambda: math.inf) -> str:
    """Send `content` as JSON to a URL by POST, or to a shell command on stdin; return why that failed, or "".

    Never raises. Returns at the latest after about `seconds`, or when the monotonic clock reaches until(), which may
    change while the alert is sent. A command that still runs then is killed, with all processes that it started.
    """
    body = json.dumps(content).encode()
    seconds = min(seconds, until() - time.monotonic())
    if seconds <= 0:
        return "the job ended before the alert was sent"
    why = [f"no answer within {seconds:g} s"]

    def work() -> None:
        try:
            why[0] = _post(target, body, seconds) if is_url(target) else _run(target, body, seconds, until)
        except subprocess.TimeoutExpired:
            return
        except urllib.error.HTTPError as error:
            why[0] = f"{error.code} {error.reason}"
        except urllib.error.URLError as error:
            why[0] = str(error.reason)
        except OSError as error:
            why[0] = error.strerror or str(error)
        except Exception as error:  # the answer is not HTTP, or the URL is invalid
            why[0] = type(error).__name__  # not its message, which may contain the URL

    # a thread, because the timeout of a socket does not end a connection on which a byte arrives now and then
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    late = time.monotonic() + seconds + 1.0
    while thread.is_alive() and time.monotonic() < min(late, until() + 1.0):
        thread.join(SLICE)
    return why[0]


def _post(url: str, body: bytes, seconds: float) -> str:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=seconds):
        return ""


def _run(command: str, body: bytes, seconds: float, until: Callable[[], float]) -> str:
    pipe, late = subprocess.PIPE, time.monotonic() + seconds
    payload: bytes | None = body
    with subprocess.Popen(
        [
            "/bin/sh",
            "-c",
            f'eval "${COMMAND}"',
        ],  # not as an argument, which every user can read: the command may contain a secret
        env={**os.environ, COMMAND: command},
        stdin=pipe,
        stdout=subprocess.DEVNULL,
        stderr=pipe,
        start_new_session=True,
    ) as process:
        while True:
            try:
                _, stderr = process.communicate(payload, timeout=min(SLICE, max(0.01, late - time.monotonic())))
                break
            except subprocess.TimeoutExpired:
                payload = None  # `communicate` still holds the input of the first call
                if time.monotonic() >= min(late, until()):
                    os.killpg(process.pid, signal.SIGKILL)  # killing only the shell would leave its child processes
                    raise
    lines = stderr.decode(errors="replace").strip().splitlines()
    return "" if process.returncode == 0 else f"exit code {process.returncode}{': ' + lines[-1] if lines else ''}"


def is_worth_sending(line: Line) -> bool:
    """Return whether a line is an alert: a warning or stronger verdict, a rollback, restart or stop, a failure."""
    match line.get("event"):
        case "verdict":
            return line.get("suggestion") not in (None, "note") and line.get("by") not in SENT_BY_THEMSELVES
        case "response":
            return line.get("action") in ("roll_back", "restart", "stop")
        case "exit":
            return bool(line.get("exit_code"))
        case "launch":
            return line.get("why") not in ("start", "joined")
    return False


class Alerts:
    """Sender of alerts: send every alert in events.jsonl once; logs/alert.offset stores the read position.

    since: epoch seconds; without a stored position, older lines are skipped
    """

    def __init__(self, run_dir: Path, target: str, since: float = 0.0) -> None:
        self.run_dir, self.target = run_dir, target
        self.place = run_dir / "logs" / "alert.offset"
        come_to = self._read_offset()
        self.since = since if come_to is None else 0.0
        self.follower = Follower(run_dir / "events.jsonl", come_to or 0)
        self.failed = False  # True after a failed alert, until an alert succeeds
        self.until = math.inf  # deadline of the last alert, on the monotonic clock

    def look(self) -> None:
        """Send the alerts among new lines, and store the offset after each alert: after a kill, at most one repeats."""
        offset = self.follower.offset
        for line in self.follower.iterate():
            if is_worth_sending(line) and _parse_time(line) >= self.since:
                why = send(self.target, {"run_dir": str(self.run_dir), **line}, until=lambda: self.until)
                self._remember()
                if why and not self.failed:
                    self._tell(why)
                self.failed = bool(why)
        if self.follower.offset != offset:
            self._remember()

    def _remember(self) -> None:
        with suppress(OSError):  # on a full disk: a repeated alert is better than a missing alert
            write_whole(self.place, str(self.follower.offset))

    def _tell(self, why: str) -> None:
        target = name_target(self.target)
        evidence = (
            f"health.monitors.alert ({target}) failed: {why}; the run continues, and alerts are lost until the target "
            "recovers"
        )
        note(self.run_dir, Verdict("alert-lost", "the run", 1.0, evidence, Action.WARN))

    def _read_offset(self) -> int | None:
        try:
            return int(read_regular(self.place))
        except (OSError, ValueError):
            return None


def _parse_time(line: Line) -> float:
    """Return the time of a line in seconds since the epoch; infinity for a line without a valid time."""
    try:
        return datetime.fromisoformat(line["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return math.inf


def main(run_dir: str, since: float) -> None:
    """Run the alert sidecar until SIGTERM, then send the remaining alerts for at most `LAST_SECONDS`."""
    over, target = threading.Event(), read_target(run_dir)
    alerts: Alerts | None = None

    def mark_end(*_: object) -> None:
        over.set()
        if alerts is not None:
            alerts.until = time.monotonic() + LAST_SECONDS

    signal.signal(signal.SIGTERM, mark_end)
    if not wait_for_lock(Path(run_dir), over):
        return
    alerts = Alerts(Path(run_dir), target, since)
    while not over.wait(INTERVAL):
        alerts.look()
    alerts.look()


def wait_for_lock(run_dir: Path, over: threading.Event) -> bool:
    """Wait until no other machine of the job sends alerts; return False if the job ends before that.

    If the file system supports no locks, returns True on each machine: each sends all alerts, and reports that.
    """
    try:
        lock = open_lock(run_dir / "logs" / "alert.lock")
        while not over.wait(INTERVAL):
            with suppress(BlockingIOError):
                lock_handle(lock, seconds=0)
                return True
    except (OSError, UserError) as error:
        why = getattr(error, "strerror", None) or str(error)
        evidence = f"logs/alert.lock cannot be locked ({why}): each machine of the job sends all alerts"
        note(run_dir, Verdict("alert-lock", "the run", 1.0, evidence, Action.NOTE))
        return True
    return False


def note(run_dir: Path, verdict: Verdict) -> None:
    """Write a verdict to events.jsonl, and print its evidence."""
    events = Events(run_dir, by="alert")
    events.write("verdict", **verdict.to_dict())
    events.close()
    print(verdict.evidence, flush=True)


def read_target(run_dir: str) -> str:
    """Return `health.monitors.alert` of the run, read here because all users can read the arguments of a process."""
    target: str = getattr(RunDirectory.open(run_dir).run().health["monitors"], "alert", "")
    return target
