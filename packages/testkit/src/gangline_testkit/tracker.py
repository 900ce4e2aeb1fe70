"""Conformance suite for trackers (group `track`): complete, killed and rolled-back runs, and unusual records."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gangline.config.serial import to_dict
from gangline.record import StepRecord
from gangline.track import Start, Tracker
from gangline_testkit.claims import mark_capability
from gangline_testkit.health import make_healthy
from gangline_testkit.suite import PartSuite

SUMMARY = {"why": "done", "evidence": "", "step": 20, "steps": 20, "tokens": 4096, "seconds": 9.5, "checkpoint": None}


def make_strange_records() -> list[StepRecord]:
    """Return records with nonfinite and missing values, lists and verdicts, and with different metrics in each step."""
    plain = make_healthy(1)[0]
    verdict = {"kind": "not-finite", "where": "step 2", "confidence": 1.0, "evidence": "nan", "suggestion": "skip"}
    return [
        replace(plain, mfu=None, rank_seconds=None, rank_phases=None, seconds={}),
        replace(plain, step=2, loss=math.nan, grad_norm=math.inf, finite=False, skipped="why", verdicts=[verdict]),
        replace(
            plain,
            step=3,
            metrics={"blocks.0/use": [1.0, 2.0, 3.0], "blocks.0/peak": math.nan},
            rank_losses=[1.0, None, math.nan],
        ),
        replace(
            plain,
            step=4,
            metrics={"new": 1.0},
            validation_loss=3.5,
            validation_losses={"code": 3.0},
            checkpoint="step-00000004",
        ),
        replace(plain, step=5, validation_loss=math.nan, tokens=0, step_seconds=0.0, tokens_per_second=0.0),
    ]


class TrackerSuite(PartSuite):
    """Conformance suite for trackers; subclass it with ``choice = "track=mine"``.

    A claim needs a suite class that overrides `read_back`, to read stored records.
    """

    CLAIMS: ClassVar[dict[str, str]] = {
        "keeps": "Every record is stored once, in order, and can be read back.",
        "resumes": "After a resume or a rollback, each step is stored once, without abandoned steps.",
    }

    def read_back(self, directory: Path) -> list[tuple[int, float]]:
        """Return (step, loss) of every stored record of the run, in order.

        Raises AssertionError if the suite class does not override this method.
        """
        raise AssertionError("override `read_back` in the suite class to read the stored records")

    def build_tracker(self, directory: Path) -> Tracker:
        """Return a new tracker of the run in this directory."""
        directory.mkdir(exist_ok=True)
        run = self.run(f"run.dir={directory}")
        return self.build(self.build_config(run), run)

    def start_tracker(self, directory: Path, first_step: int = 0) -> Tracker:
        """Return a tracker after `begin`. first_step: 0 for a new run, else the step of a resume."""
        tracker = self.build_tracker(directory)
        tracker.begin(
            Start(
                name="run",
                directory=str(directory),
                first_step=first_step,
                last_step=20,
                attempt=1,
                parameters=1000,
                world=2,
                describe={"data": "counting words", "device": "cpu"},
                config=to_dict(self.run(f"run.dir={directory}")),
            )
        )
        return tracker

    def run_once(self, directory: Path, records: list[StepRecord], first_step: int = 0, end: bool = True) -> None:
        """Send the records of one start of a run to a tracker, as core does. end: false for a killed run."""
        tracker = self.start_tracker(directory, first_step)
        for record in records:
            tracker.record(record)
        if end:
            tracker.end(dict(SUMMARY))

    def test_tracker_accepts_a_complete_run(self, tmp_path: Path) -> None:
        tracker = self.start_tracker(tmp_path / "run")
        tracker.note("a line for people, with [brackets] and % signs")
        for record in make_healthy(20):
            tracker.record(record)
        tracker.note("saved step-00000020")
        tracker.end(dict(SUMMARY))

    def test_unusual_records_raise_no_error(self, tmp_path: Path) -> None:
        self.run_once(tmp_path / "run", make_strange_records())

    def test_tracker_does_not_change_records(self, tmp_path: Path) -> None:
        """Check that the tracker does not change records: other trackers and health checks read the same objects."""
        records = make_strange_records()
        before = repr(copy.deepcopy(records))  # compares text, because nan differs from itself
        self.run_once(tmp_path / "run", records)
        assert repr(records) == before, "the tracker changed a step record"

    def test_run_may_end_before_its_first_step(self, tmp_path: Path) -> None:
        self.start_tracker(tmp_path / "run").end({**SUMMARY, "why": "SIGTERM", "step": 0, "steps": 0, "tokens": 0})

    def test_killed_run_can_be_resumed_twice(self, tmp_path: Path) -> None:
        """Check that new processes can resume in the directory of a killed run, twice from the same step."""
        records = make_healthy(12)
        self.run_once(tmp_path / "run", records[:8], end=False)
        self.run_once(tmp_path / "run", records[5:9], first_step=5, end=False)
        self.run_once(tmp_path / "run", records[5:], first_step=5)

    def test_steps_may_repeat_after_a_rollback(self, tmp_path: Path) -> None:
        """Check that a tracker accepts repeated steps, as after a rollback."""
        records = make_healthy(12)
        self.run_once(tmp_path / "run", [*records[:8], *records[5:]])

    def test_tracker_writes_only_into_the_run_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        self.run_once(tmp_path / "run", make_healthy(5))
        assert not list(elsewhere.iterdir())
        assert {path.name for path in tmp_path.iterdir()} == {"run", "elsewhere"}

    @mark_capability("keeps")
    def test_every_record_is_stored_once_in_order(self, tmp_path: Path) -> None:
        """Check that every record is stored once, in order of steps."""
        records = make_healthy(20)
        self.run_once(tmp_path / "run", records)
        self.check_same(self.read_back(tmp_path / "run"), records)

    @mark_capability("resumes")
    def test_abandoned_steps_are_removed(self, tmp_path: Path) -> None:
        """Check that abandoned steps are removed: a kill after step 8, a resume from step 5, a rollback to step 9."""
        records = make_healthy(12)
        other = [replace(record, loss=record.loss + 10) for record in records[5:]]
        again = [replace(record, loss=record.loss + 20) for record in records[9:]]
        self.run_once(tmp_path / "run", records[:8], end=False)
        self.run_once(tmp_path / "run", [*other, *again], first_step=5)
        self.check_same(self.read_back(tmp_path / "run"), [*records[:5], *other[:4], *again])

    @staticmethod
    def check_same(kept: list[tuple[int, Any]], records: list[StepRecord]) -> None:
        """Assert equal steps, and losses equal to six digits (some trackers store float32)."""
        assert [step for step, _ in kept] == [record.step for record in records]
        for (step, loss), record in zip(kept, records, strict=True):
            assert math.isclose(loss, record.loss, rel_tol=1e-6), (
                f"step {step}: the stored loss is {loss}, expected {record.loss}"
            )
