"""Background thread between a run and a tracking service: no delayed step, each step sent once."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gangline.record import StepRecord
from gangline.track import Start
from gangline.train.report import Reporter
from gangline_testkit.health import make_healthy
from gangline_track.background import BackgroundTracker, Connection, TrackingFailed, get_lists
from gangline_track.config import Service


class Kept(Connection):
    """Service in memory that several starts share."""

    def __init__(self, store: list[tuple[int, float]], gate: threading.Event | None = None, error: str = "") -> None:
        self.store, self.gate, self.error, self.closed = store, gate, error, False

    def open(self, start: Start) -> int:
        return max((step for step, _ in self.store), default=0)

    def send(self, records: list[StepRecord]) -> None:
        if self.gate is not None:
            self.gate.wait()
        if self.error:
            raise ConnectionError(self.error)
        self.store += [(record.step, record.loss) for record in records]

    def close(self, summary: dict[str, Any], notes: list[str], pictures: list[Path]) -> None:
        self.closed = True
        self.notes, self.pictures = notes, [path.name for path in pictures]


def begun(directory: Path, connection: Connection, first: int = 0, **options: Any) -> BackgroundTracker:
    tracker = BackgroundTracker("mine", Service(**({"deadline_seconds": 300.0} | options)), lambda: connection)
    tracker.begin(Start("run", str(directory), first, 100, 1, 10, 1))
    return tracker


def jsonl(directory: Path, records: list[StepRecord]) -> None:
    (directory / "metrics.jsonl").write_text("".join(record.to_json() + "\n" for record in records))


def test_hanging_service_does_not_delay_run(tmp_path: Path, capsys) -> None:
    gate = threading.Event()
    tracker = begun(tmp_path, Kept([], gate), queue=5, deadline_seconds=0.2)
    for record in make_healthy(100):
        tracker.record(record)
    tracker.end({"why": "done"})  # would wait forever without the deadline
    said = capsys.readouterr().err
    gate.set()
    assert said.count("slower than the run") == 1
    assert said.count("did not finish within deadline_seconds=0.2") == 1


def test_start_end_closes_service_without_waiting(tmp_path: Path) -> None:
    """Begin the end while the queue is full: the service closes before `end` waits for its deadline."""
    gate = threading.Event()

    class Slow(Kept):
        def open(self, start: Start) -> int:
            gate.wait()
            return super().open(start)

    connection = Slow([])
    tracker = begun(tmp_path, connection, queue=5)
    for record in make_healthy(100):
        tracker.record(record)
    tracker.start_end({"why": "done"})
    gate.set()
    tracker.thread.join(120)
    assert connection.closed
    assert [step for step, _ in connection.store] == [record.step for record in make_healthy(5)]
    tracker.end({"why": "done"})


def test_service_error_is_raised_by_next_record(tmp_path: Path) -> None:
    tracker = begun(tmp_path, Kept([], error="the key has expired"))

    def told() -> None:
        until = time.monotonic() + 300
        for record in make_healthy(30_000):
            tracker.record(record)
            time.sleep(0.01)
            assert time.monotonic() < until

    with pytest.raises(TrackingFailed, match="ConnectionError: the key has expired"):
        told()


def test_resume_after_kill_sends_each_step_once(tmp_path: Path) -> None:
    """Resume after step 7 of eight recorded steps, of which the service received six."""
    records = make_healthy(12)
    store = [(record.step, record.loss) for record in records[:6]]
    jsonl(tmp_path, records[:8])
    tracker = begun(tmp_path, Kept(store), first=7)
    for record in records[7:]:
        tracker.record(record)
    tracker.end({"why": "done"})
    assert store == [(record.step, record.loss) for record in records]


def test_resume_from_earlier_step_resends_no_step(tmp_path: Path) -> None:
    records = make_healthy(12)
    store = [(record.step, record.loss) for record in records[:8]]
    jsonl(tmp_path, records[:8])
    tracker = begun(tmp_path, Kept(store), first=5)
    for record in records[5:]:
        tracker.record(record)
    tracker.end({"why": "done"})
    assert store == [(record.step, record.loss) for record in records]


def test_rollback_resends_no_step(tmp_path: Path) -> None:
    records, store = make_healthy(12), []
    tracker = begun(tmp_path, Kept(store))
    for record in [*records[:8], *records[5:]]:
        tracker.record(record)
    tracker.end({"why": "done"})
    assert [step for step, _ in store] == [record.step for record in records]


def test_tracker_with_every_5_sends_each_fifth_step(tmp_path: Path) -> None:
    store: list[tuple[int, float]] = []
    tracker = begun(tmp_path, Kept(store), every=5)
    for record in make_healthy(12):
        tracker.record(record)
    tracker.end({"why": "done"})
    assert [step for step, _ in store] == [5, 10]


def test_notes_and_figures_are_sent_at_end(tmp_path: Path) -> None:
    connection = Kept([])
    (tmp_path / "load.png").write_bytes(b"")
    tracker = begun(tmp_path, connection)
    tracker.note("a line")
    tracker.end({"why": "done"})
    assert (connection.closed, connection.notes, connection.pictures) == (True, ["a line"], ["load.png"])


def test_next_start_closes_tracker_left_by_error(tmp_path: Path) -> None:
    records, store = make_healthy(6), []
    first = Kept(store)
    left = begun(tmp_path, first)
    for record in records[:3]:
        left.record(record)
    tracker = begun(tmp_path, Kept(store), first=3)
    for record in records[3:]:
        tracker.record(record)
    tracker.end({"why": "done"})
    assert first.closed
    assert [step for step, _ in store] == [record.step for record in records]


def test_deadlines_of_hanging_trackers_run_concurrently(tmp_path: Path, monkeypatch) -> None:
    """Begin the deadlines of both trackers before the wait for the first one, and do not extend them."""
    gate, seen = threading.Event(), []
    trackers = {name: begun(tmp_path / name, Kept([], gate), queue=50, deadline_seconds=0.2) for name in ("a", "b")}

    for tracker in trackers.values():
        tracker.record(make_healthy(1)[0])

        def join(wait: float, join=tracker.thread.join) -> None:
            seen.append([one.until for one in trackers.values()])
            join(wait)

        monkeypatch.setattr(tracker.thread, "join", join)
    reporter = Reporter(dict(trackers), 1.0, 1, None, {})
    reporter.end({"why": "error"})
    gate.set()
    first, second = seen
    assert None not in first
    assert first == second
    assert not reporter.failed


def test_list_in_a_record_keeps_its_finite_numbers():
    """Mix numbers and strings, because metrics.jsonl stores a number that is not finite as a string."""
    (record,) = make_healthy(1)
    record.metrics["load"] = [1.0, float("nan"), "inf", 2.0]
    record.metrics["norms"] = [float("-inf")]
    found = get_lists(record)
    assert found["load"] == [1.0, 2.0]
    assert found["norms"] == []
