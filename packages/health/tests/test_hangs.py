"""`health.monitors.hangs` on real ranks: a stopped or hung rank is reported, killed and restarted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import StreamRequestHandler, TCPServer

import pytest

from gangline.pulse import memory
from gangline.pulse.write import Pulse
from gangline.run.events import read_events
from gangline_basics.launch.failures import find_first
from gangline_health.hangs import flight
from gangline_health.hangs.config import HangsOptions
from gangline_health.hangs.diagnose import Diagnosis, Watched
from gangline_health.hangs.watch import Watcher
from gangline_health.pulses import PulseReader, Seen, find, open_readers
from gangline_testkit.real_runs import RealRuns

FOUR = ("parallel=ddp", "launch.processes=4", "launch.max_restarts=3", "health=monitors", "run.steps=100000")


@pytest.fixture
def runs(tmp_path: Path):
    with RealRuns(tmp_path) as found:
        yield found


def rank_of(run_dir: Path, rank: int) -> PulseReader:
    return wait_for(lambda: next((reader for reader in open_readers(run_dir) if reader.read().rank == rank), None))


def verdicts(run_dir: Path, kind: str = "hang") -> list[dict]:
    return [line for line in read_events(run_dir) if line["event"] == "verdict" and line["kind"] == kind]


def wait_for(condition, seconds: float = 120.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.1)
    return found


def test_stopped_rank_is_killed_and_run_continues(runs):
    run = runs.fork("run.dir=out", *FOUR, "checkpoint.every=20", TORCH_FR_BUFFER_SIZE="64")
    out = runs.directory / "out"
    runs.wait_for_step(run, "out", 60)
    stopped = rank_of(out, 2).read()
    os.kill(stopped.pid, signal.SIGSTOP)
    (verdict,) = wait_for(lambda: verdicts(out))
    assert verdict["details"]["ranks"] == [2]
    assert verdict["details"]["why"] == "stopped"
    assert verdict["where"] == "rank 2"
    place = wait_for(lambda: list((out / "logs").glob("hang-*.json")))[0]
    wait_for(lambda: place.read_text().endswith("}"))
    report = json.loads(place.read_text())
    assert report["of_each_rank"]["2"]["state"] == "T"
    stacks = "\n".join(report["of_each_rank"]["0"]["stacks"])
    assert "in run_steps" in stacks, "where the others wait is in their stacks"
    flights = [json.loads((out / "logs" / name).read_text()) for name in report["flight_recorder"]]
    assert len(flights) == 3, "torch's own record, of those that could answer"
    assert all(any(entry["profiling_name"].startswith("gloo:") for entry in one["entries"]) for one in flights)
    begun = len(runs.read_records("out"))
    wait_for(lambda: rank_of(out, 2).read().pid != stopped.pid if len(find(out)) == 4 else False)
    wait_for(lambda: len(runs.read_records("out")) > begun + 20)
    os.kill(run.pid, signal.SIGINT)
    printed, _ = run.communicate(timeout=120)
    assert "rank 2 failed first: hang: rank 2" in printed
    assert len(verdicts(out)) == 1


def test_hang_with_act_warn_is_only_reported(runs):
    """Check that each hang that ends by itself is reported, and that signals of the watchdog stop no rank."""
    words = ("parallel=ddp", "launch.processes=2", "run.steps=100000", "checkpoint=off")
    run = runs.fork("run.dir=out", *words, "health=[monitors]", "health.monitors.hangs.act=warn")
    out = runs.directory / "out"
    runs.wait_for_step(run, "out", 20)
    stacks = out / "logs" / "hang-1-rank-00001.json"
    for stops in (1, 2):
        stopped = rank_of(out, 1).read().pid
        os.kill(stopped, signal.SIGSTOP)
        wait_for(lambda stops=stops: len(verdicts(out)) == stops)
        wait_for(lambda: stacks.exists() and stacks.read_text().endswith("}"))
        stacks.unlink()
        os.kill(stopped, signal.SIGCONT)
        begun = len(runs.read_records("out"))
        wait_for(lambda begun=begun: len(runs.read_records("out")) > begun + 10)
    assert run.poll() is None
    assert not [line for line in read_events(out) if line["event"] in ("end", "response")]
    assert [line["suggestion"] for line in verdicts(out)] == ["warn", "warn"]


SLEEPS = """
import time
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.config import HealthConfig
from gangline.health import HealthCheck


@dataclass
class Sleeps(HealthConfig):
    pass


class SleepsCheck(HealthCheck):
    def __init__(self, config, run):
        pass

    def attach(self, runtime, optimizer, comms, store, device):
        self.rank = comms.rank

    def observe(self, record):
        if self.rank == 1 and record.step >= 40:
            time.sleep(10000)
        return ()


@hookimpl
def gangline_health_checks():
    yield Part(name="sleeps", config=Sleeps, build="sleeps:SleepsCheck", summary="Never returns")
"""


def offer(runs: RealRuns, site: Path, source: str) -> None:
    """Write a plugin `sleeps` with this source, and add the plugin to the path of `runs`."""
    about = site / "gangline_sleeps-0.1.0.dist-info"
    about.mkdir(parents=True)
    (site / "sleeps.py").write_text(source)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gangline-sleeps\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text("[gangline.v1]\nsleeps = sleeps\n")
    runs.environment["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])


def test_hung_health_check_is_disabled_and_run_continues(runs, tmp_path: Path) -> None:
    offer(runs, tmp_path / "site", SLEEPS)
    words = ("parallel=ddp", "launch.processes=2", "run.steps=60", "checkpoint.every=10", "launch.max_restarts=3")
    runs.train("run.dir=out", *words, "health=[monitors,sleeps]", "health.monitors.hangs.quiet_seconds=2")
    (hang,) = verdicts(tmp_path / "out")
    assert hang["details"]["ranks"] == [1]
    assert "(in code of health=sleeps)" in hang["evidence"]
    (failed,) = verdicts(tmp_path / "out", "check-failed")
    wanted = "health=sleeps is disabled until the job ends or its code changes: rank 1 failed first: hang"
    assert failed["evidence"].startswith(wanted)
    assert [record["step"] for record in runs.read_records("out")] == list(range(1, 61))


@pytest.mark.nightly  # no limits are learned during the build, so the limit must cover a slow build
def test_health_check_hung_at_start_is_disabled(runs, tmp_path: Path) -> None:
    """Check a hang during the build, in which the other ranks wait: the next start runs without the hung check."""
    stands = "self.rank = comms.rank\n        if comms.rank == 1:\n            time.sleep(10000)"
    offer(runs, tmp_path / "site", SLEEPS.replace("self.rank = comms.rank", stands))
    words = ("parallel=ddp", "launch.processes=2", "run.steps=4", "launch.max_restarts=1", "health=[monitors,sleeps]")
    limits = ("floor_seconds=5", "quiet_seconds=10", "unlearned_seconds=20")
    runs.train("run.dir=out", *words, *(f"health.monitors.hangs.{limit}" for limit in limits))
    (hang,) = verdicts(tmp_path / "out")
    assert hang["details"]["ranks"] == [1]
    assert "(in code of health=sleeps)" in hang["evidence"]
    (failed,) = verdicts(tmp_path / "out", "check-failed")
    assert failed["evidence"].startswith("health=sleeps is disabled until the job ends")
    assert [record["step"] for record in runs.read_records("out")] == [1, 2, 3, 4]


@pytest.mark.parametrize("trouble", ["an odd answer", "no URL", "no room for the stacks"])
def test_hung_rank_is_killed_when_reporting_fails(tmp_path: Path, trouble: str) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    child = subprocess.Popen(["sleep", "1000"])
    seen = Seen(0, 1, 1, child.pid, True, 2, 7, "forward", "", 1.0, None, member="health/mine")
    watcher = Watcher(tmp_path, HangsOptions(), "http://[bad" if trouble == "no URL" else "")
    watcher.list_ranks = lambda: [Watched(seen, 99.0, 1.0, "S")]  # type: ignore[method-assign]
    if trouble == "no room for the stacks":
        (logs / "hang-1-rank-00000.json").mkdir()
    try:
        with answers_oddly() as url:
            watcher.alert = url if trouble == "an odd answer" else watcher.alert
            watcher.act(Diagnosis((0,), "alone", "", "rank 0 stands still"))
        assert child.wait(60) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()
    failure = find_first(logs, 1)
    assert failure is not None
    assert (failure.rank, failure.what) == (0, "hang: rank 0 stands still; the rank was killed")
    assert failure.member == "health/mine", "the next start leaves it out"


@pytest.mark.parametrize(("why", "member"), [("behind", "health/monitors"), ("transfer", ""), ("stopped", "")])
def test_hang_names_health_check_only_for_late_rank(tmp_path: Path, why: str, member: str) -> None:
    (tmp_path / "logs").mkdir()
    children = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    try:
        seen = [
            Seen(rank, 2, 1, child.pid, True, 2, 7, "collective", "", 1.0, None, member="health/monitors")
            for rank, child in enumerate(children)
        ]
        watcher = Watcher(tmp_path, HangsOptions())
        watcher.list_ranks = lambda: [Watched(each, 99.0, 1.0, "S") for each in seen]  # type: ignore[method-assign]
        watcher.act(Diagnosis((0, 1), why, "all_gather", "nothing moves"))
        assert children[0].wait(60) == -signal.SIGKILL
    finally:
        for child in children:
            child.kill()
            child.wait()
    failure = find_first(tmp_path / "logs", 1)
    assert failure is not None
    assert failure.member == member


def test_dead_rank_pulses_do_not_hide_stopped_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a pulse file that remains from an earlier start with more ranks, and whose rank is dead."""
    earlier = "import sys; from gangline.pulse.write import Pulse; Pulse.open(sys.argv[1], 5, 8, 1, int(sys.argv[2]))"
    ours = str(os.getpid())
    monkeypatch.setattr("gangline_health.hangs.processes.read_state", lambda _pid: ("T", 0.0))
    (tmp_path / "logs").mkdir()
    watcher = Watcher(tmp_path, HangsOptions())
    try:
        subprocess.run([sys.executable, "-c", earlier, str(tmp_path), ours], check=True)
        watcher.look(0.2)
        Pulse.open(tmp_path, 0, 1, 2, os.getpid())
        for _ in range(100):
            if found := watcher.look(10.0):
                break
        assert found is not None
        assert (found.why, found.ranks) == ("stopped", (0,))
        assert [one.rank for one in watcher.list_ranks()] == [0]
    finally:
        memory.remove(os.getpid())


@contextmanager
def answers_oddly() -> Iterator[str]:
    """Yield the URL of a server that does not speak HTTP."""

    class Odd(StreamRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(b"SSH-2.0-OpenSSH\r\n")

    with TCPServer(("127.0.0.1", 0), Odd) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.mark.parametrize(
    ("words", "wrong", "fixed"),
    [
        (("launch.timeout_seconds=60",), "launch.timeout_seconds=60 must be longer than", "launch.timeout_seconds="),
        (
            ("health.monitors.hangs.floor_seconds=90",),
            "floor_seconds=90 must be at most health.monitors.hangs.quiet_seconds",
            "=180",
        ),
        (("health.monitors.hangs.quiet_seconds=1000",), "quiet_seconds=1000 must be at most", "unlearned_seconds=2000"),
    ],
)
def test_limits_in_the_wrong_order_are_refused(runs, words, wrong, fixed):
    printed = runs.expect_refusal("run.dir=out", "health=monitors", *words)
    assert wrong in printed
    assert fixed in printed
    assert not (runs.directory / "out").exists()


def test_missing_flight_recorder_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that `collect` does not wait for a rank whose flight recorder is off or missing in torch."""
    assert not flight.listen(str(tmp_path), 0, {})
    assert not flight.listen(str(tmp_path), 0, {"TORCH_FR_BUFFER_SIZE": "0"})
    monkeypatch.setattr(flight, "DUMPS", ("_dump_that_no_version_has",))
    assert not flight.listen(str(tmp_path), 0, {"TORCH_FR_BUFFER_SIZE": "5"})
    sleeper, began = subprocess.Popen(["sleep", "100"]), time.monotonic()
    try:
        seen = Seen(0, 1, 1, sleeper.pid, True, 2, 7, "forward", "", 1.0, None)
        assert flight.collect(tmp_path, [seen], seconds=600.0) == []
        assert time.monotonic() - began < 300
        assert sleeper.poll() is None, "a signal without a handler would have ended it"
    finally:
        sleeper.kill()
        sleeper.wait()
