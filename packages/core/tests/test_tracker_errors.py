"""Exceptions that end a run: trackers are closed and write the steps before the exception."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gangline.record import StepRecord
from gangline.track import Tracker
from gangline.train.rank import train
from gangline_testkit.sessions import open_session


class Kept(Tracker):
    """Tracker that sends all records at the end, as a batching tracker does."""

    def __init__(self, fails: BaseException | None = None) -> None:
        self.held: list[int] = []
        self.sent: list[int] = []
        self.summaries: list[dict[str, Any]] = []
        self.fails = fails

    def record(self, record: StepRecord) -> None:
        self.held.append(record.step)

    def end(self, summary: dict[str, Any]) -> None:
        self.sent, self.held = self.held, []
        self.summaries.append(summary)
        if self.fails is not None:
            raise self.fails


def failing(place: Path, tracker: Tracker, where: str = "optimizer", at: int = 3):
    """Open a session whose optimizer raises an error after step `at`, or whose checkpointer raises one in `close`."""
    s = open_session(place / "out", "run.steps=6", "callback=[]")
    s.reporter.trackers["kept"] = tracker
    if where == "save":

        def fail(*_: object, **__: object) -> None:
            raise OSError("the store is gone")

        s.checkpointer.close = fail
        return s
    step = s.optimizer.step

    def break_at(*arguments: Any, **more: Any) -> Any:
        if s.step + 1 > at:
            raise ZeroDivisionError("step 4 is broken\nand a second line")
        return step(*arguments, **more)

    s.optimizer.step = break_at
    return s


def test_an_error_within_the_loop_ends_the_trackers(tmp_path: Path) -> None:
    tracker = Kept()
    with pytest.raises(ZeroDivisionError, match="step 4 is broken"):
        train(failing(tmp_path, tracker))
    assert tracker.sent == [1, 2, 3]
    (summary,) = tracker.summaries
    assert (summary["why"], summary["evidence"]) == ("error", "ZeroDivisionError: step 4 is broken")
    assert (summary["step"], summary["steps"]) == (3, 3)


def test_error_after_the_loop_ends_trackers(tmp_path: Path) -> None:
    tracker = Kept()
    with pytest.raises(OSError, match="the store is gone"):
        train(failing(tmp_path, tracker, "save"))
    assert tracker.sent == [1, 2, 3, 4, 5, 6]
    assert [summary["why"] for summary in tracker.summaries] == ["error"]


def test_lost_peer_is_reported_in_one_line(tmp_path: Path) -> None:
    tracker = Kept()
    s = failing(tmp_path, tracker)

    def lose_peer(*_: Any, **__: Any) -> None:
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:14737")

    s.optimizer.step = lose_peer
    with pytest.raises(RuntimeError, match="gloo"):
        train(s)
    (summary,) = tracker.summaries
    log = tmp_path / "out" / "logs" / "rank-00000.log"
    assert summary["evidence"] == f"lost the connection to another rank (details: {log})"


@pytest.mark.parametrize("fails", [RuntimeError("away"), KeyboardInterrupt()])
def test_tracker_error_does_not_hide_run_error(tmp_path: Path, fails: BaseException) -> None:
    with pytest.raises(ZeroDivisionError, match="step 4 is broken"):
        train(failing(tmp_path, Kept(fails)))


def test_successful_run_ends_trackers_once(tmp_path: Path) -> None:
    s, tracker = open_session(tmp_path / "out", "run.steps=3"), Kept()
    s.reporter.trackers["kept"] = tracker
    assert train(s) == 0
    assert [summary["why"] for summary in tracker.summaries] == ["done"]
