"""Alert sidecar: sends each verdict above a note, and orders and failures, to a command or a webhook. Torch-free.

It reads events.jsonl next to the run, so that no step waits for an answer. On several machines one sidecar sends; if it
is lost, another continues from where the first had come to.
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

INTERVAL = 0.5  # seconds between two looks
SECONDS = 10.0  # a command or a server that takes longer has failed
LAST_SECONDS = 7.0  # for all alerts at the end of the job: less than a sidecar then has
SLICE = 0.2  # seconds between two checks for the end of the job
COMMAND = "GANGLINE_ALERT"  # environment variable that hands the command to its shell
SENT_BY_THEMSELVES = ("alert", "watcher")  # writers that send their own alerts: the hang watcher before it kills

Line = dict[str, Any]


def send(target: str, content: Line, seconds: float = SECONDS, until: Callable[[], float] = lambda: math.inf) -> str:
    """Send JSON to a URL by POST, or else to a shell command on its input; return why that failed, or "".

    Raises nothing, and returns after about `seconds`, whatever the other side does. A command, and all that it has
    started, is killed then, or at the time `until` of the monotonic clock, which may become earlier meanwhile.
    """
    body = json.dumps(content).encode()
    seconds = min(seconds, until() - time.monotonic())
    if seconds <= 0:
        return "the job was over before its turn came"
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
        except Exception as error:  # the answer is no HTTP, or the URL is invalid
            why[0] = type(error).__name__  # the message may hold the URL

    # a socket's timeout never ends a connection to a server that sends a byte now and then
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
        ],  # every user can read the arguments of a process, and the command may hold a secret
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
                payload = None  # `communicate` still has it from the first call
                if time.monotonic() >= min(late, until()):
                    os.killpg(process.pid, signal.SIGKILL)  # killing the shell alone would leave what it has started
                    raise
    lines = stderr.decode(errors="replace").strip().splitlines()
    return "" if process.returncode == 0 else f"exit code {process.returncode}{': ' + lines[-1] if lines else ''}"


def is_worth_sending(line: Line) -> bool:
    """Return whether to send a line: a verdict above a note, a return, restart or stop, a failure, a new launch."""
    match line.get("event"):
        case "verdict":
            return line.get("suggestion") not in (None, "note") and line.get("by") not in SENT_BY_THEMSELVES
        case "order":
            return line.get("action") in ("roll_back", "restart", "stop")
        case "exit":
            return bool(line.get("exit_code"))
        case "launch":
            return line.get("why") not in ("start", "joined")
    return False


class Alerts:
    """Sender of alerts: sends each line that is worth it once, and stores how far it has come.

    since  time (seconds since the epoch) before which lines are not sent, if no sidecar has sent any yet
    """

    def __init__(self, run_dir: Path, target: str, since: float = 0.0) -> None:
        self.run_dir, self.target = run_dir, target
        self.place = run_dir / "logs" / "alert.offset"
        come_to = self._read_offset()
        self.since = since if come_to is None else 0.0
        self.follower = Follower(run_dir / "events.jsonl", come_to or 0)
        self.failed = False  # True until an alert arrives again
        self.until = math.inf  # deadline of the last alert, on the monotonic clock

    def look(self) -> None:
        """Send new lines, and store the offset after each, so that a kill repeats one at most."""
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
        with suppress(OSError):  # a full disk: an alert that repeats is better than none
            write_whole(self.place, str(self.follower.offset))

    def _tell(self, why: str) -> None:
        target = name_target(self.target)
        evidence = f"health.monitors.alert ({target}): {why}; the run goes on, and nobody is told until it works again"
        note(self.run_dir, Verdict("alert-lost", "the run", 1.0, evidence, Action.WARN))

    def _read_offset(self) -> int | None:
        try:
            return int(read_regular(self.place))
        except (OSError, ValueError):
            return None


def _parse_time(line: Line) -> float:
    """Return the time of a line in seconds since the epoch; infinity for a line without one."""
    try:
        return datetime.fromisoformat(line["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return math.inf


def main(run_dir: str, since: float) -> None:
    """Run the alert sidecar. At the end of the job, it still sends what the end of the run wrote."""
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
    """Wait until no other machine of the job sends alerts; return False if the run ends before that.

    If no file can be locked, each machine sends all alerts, which is reported once.
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
    """Write a verdict to events.jsonl, and its evidence to the log."""
    events = Events(run_dir, by="alert")
    events.write("verdict", **verdict.to_dict())
    events.close()
    print(verdict.evidence, flush=True)


def read_target(run_dir: str) -> str:
    """Return `health.monitors.alert` with this process's environment: all users can read a process's command line."""
    target: str = getattr(RunDirectory.open(run_dir).run().health["monitors"], "alert", "")
    return target
