"""Conformance suite for health checks (hook `gangline_health_checks`): records with and without injected faults."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from gangline.health import Action, Agreed, HealthCheck, Verdict, decide
from gangline.record import StepRecord
from gangline.run.attempts import Attempt
from gangline_testkit.claims import Unclaimed
from gangline_testkit.health_ranks import ask_check, attach_check, build_small_runtime, observe_records, run_training
from gangline_testkit.pool import get_pool
from gangline_testkit.suite import PartSuite

LIVED = 4  # steps of a real run before and after its resume
STEPS, FAULT = 160, 100  # length of a run, and the step of its fault
PATIENCE = 40  # number of steps within which a check must report a fault

Records = list[StepRecord]


def make_healthy(steps: int = STEPS, seed: int = 0) -> Records:
    """Return the records of a healthy run: a noisy falling loss, nearly constant step times, constant memory."""
    noise = np.random.Generator(np.random.Philox(key=seed)).standard_normal((steps, 4))
    records = []
    for step in range(1, steps + 1):
        a, b, c, d = (float(x) for x in noise[step - 1])
        seconds = 0.5 * (1 + 0.02 * abs(b))
        records.append(
            StepRecord(
                step=step,
                attempt=1,
                loss=2.0 + 4.0 * math.exp(-step / 60) + 0.03 * a,
                grad_norm=0.5 * (1 + 0.1 * abs(c)) + 2.0 * math.exp(-step / 20),
                learning_rate=1e-3,
                tokens=4096,
                tokens_per_second=4096 / seconds,
                mfu=0.4,
                step_seconds=seconds,
                seconds={"data": 0.001, "forward_backward": seconds * 0.9, "optimizer": seconds * 0.09},
                rank_seconds={"min": seconds * 0.98, "median": seconds, "max": seconds * (1.02 + 0.01 * abs(d))},
                rank_phases={
                    "data": [0.001, 0.001, 0.001 + 1e-5 * abs(d)],
                    "forward": [seconds * 0.3, seconds * 0.31, seconds * (0.3 + 0.01 * abs(d))],
                    "backward": [seconds * 0.5, seconds * 0.51, seconds * (0.5 + 0.02 * abs(c))],
                    "optimizer": [seconds * 0.09] * 3,
                    "collective": [seconds * 0.1, seconds * 0.08, seconds * 0.05],
                    "checkpoint": [0.0] * 3,
                    "other": [0.002] * 3,
                },
                memory_bytes=8 << 30,
            )
        )
    return records


def _from(change: Callable[[StepRecord, int], StepRecord], steps: int = STEPS) -> Callable[[Records], Records]:
    """Return a function that applies `change(record, step - FAULT)` to `steps` records from step FAULT on."""

    def add_fault(records: Records) -> Records:
        return [
            change(record, record.step - FAULT) if FAULT <= record.step < FAULT + steps else record
            for record in records
        ]

    return add_fault


def _count_bytes(record: StepRecord, growth: float) -> StepRecord:
    return replace(record, memory_bytes=int(record.memory_bytes * growth))


FAULTS: dict[str, Callable[[Records], Records]] = {
    "not-finite": _from(lambda r, n: replace(r, loss=math.nan, grad_norm=math.nan, finite=False), 5),
    "loss-spike": _from(lambda r, n: replace(r, loss=r.loss * 4, grad_norm=r.grad_norm * 20), 3),
    "gradient-spike": _from(lambda r, n: replace(r, grad_norm=r.grad_norm * 100), 1),
    "divergence": _from(lambda r, n: replace(r, loss=r.loss + 0.15 * n)),
    "slow-rank": _from(lambda r, n: replace(r, rank_seconds={**(r.rank_seconds or {}), "max": r.step_seconds * 3})),
    "slow-steps": _from(
        lambda r, n: replace(r, step_seconds=r.step_seconds * 5, tokens_per_second=r.tokens_per_second / 5)
    ),
    "memory-growth": _from(lambda r, n: _count_bytes(r, 1 + 0.03 * n)),
}


class HealthCheckSuite(PartSuite):
    """Conformance suite for health checks; subclass it with ``choice = "health=mine"``.

    can: names of the faults that the check reports. To test another fault, a subclass adds it to `faults` and `CLAIMS`.
    """

    CLAIMS: ClassVar[dict[str, str]] = {
        name: f"The check reports the fault {name} within {PATIENCE} steps." for name in FAULTS
    }
    faults: ClassVar[dict[str, Callable[[Records], Records]]] = FAULTS

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "fault" in metafunc.fixturenames:
            metafunc.parametrize("fault", list(self.faults))

    def check(self) -> HealthCheck:
        """Return a new check, attached as before the first step of a run."""
        run = self.run()
        return attach_check(self.build(self.build_config(run), run), self.offer.part.name)

    def find_verdicts(self, records: Records, check: HealthCheck | None = None) -> list[tuple[int, Verdict]]:
        """Return (step, verdict) for each verdict of a check in one process. check: None for a new check."""
        check, (*_, comms) = check or self.check(), build_small_runtime()
        return [(record.step, verdict) for record in records for verdict in ask_check(check, record, comms.world)]

    # --- faults ------------------------------------------------------------------------------------------------------

    def test_healthy_run_gets_no_warning(self) -> None:
        """Check that five healthy runs get no verdict with an action stronger than `Action.NOTE`."""
        for seed in range(5):
            loud = [(step, v) for step, v in self.find_verdicts(make_healthy(400, seed)) if v.suggestion > Action.NOTE]
            assert not loud, f"verdict on a healthy run: {loud[0][1].kind} at step {loud[0][0]}: {loud[0][1].evidence}"

    def test_check_catches_the_fault(self, fault: str) -> None:
        """Check that the check reports a claimed fault in time, and warn if it reports an unclaimed fault."""
        verdicts = self.find_verdicts(self.faults[fault](make_healthy()))
        steps = [step for step, verdict in verdicts if verdict.suggestion > Action.NOTE]
        caught = bool(steps) and FAULT <= steps[0] <= FAULT + PATIENCE
        if fault in self.can:
            assert caught, (
                f"{fault} at step {FAULT} is not reported within {PATIENCE} steps; steps with verdicts: {steps}"
            )
        elif caught:
            warnings.warn(Unclaimed(self.choice, fault, "test_check_catches_the_fault"), stacklevel=1)

    test_check_catches_the_fault.capability_in = "fault"  # type: ignore[attr-defined]

    def test_verdicts_have_kind_place_evidence_and_action(self, fault: str) -> None:
        for _, verdict in self.find_verdicts(self.faults[fault](make_healthy())):
            assert isinstance(verdict, Verdict)
            assert verdict.kind
            assert verdict.kind == verdict.kind.lower()
            assert " " not in verdict.kind
            assert 0 <= verdict.confidence <= 1
            assert verdict.where
            assert any(letter.isdigit() for letter in verdict.evidence), (
                f"the evidence of a verdict must contain a number: {verdict.evidence!r}"
            )
            assert isinstance(verdict.suggestion, Action)
            json.dumps(verdict.to_dict())

    # --- responses ---------------------------------------------------------------------------------------------------

    def test_response_depends_only_on_agreed_verdicts(self, fault: str) -> None:
        """Check that `respond` depends only on the agreed verdicts: equal on a second call, and from a new check."""
        from gangline.train.verdicts import make_not_finite

        check = self.check()
        attempts: list[Attempt] = []
        for record in self.faults[fault](make_healthy()):
            verdicts = tuple(verdict for _, verdict in self.find_verdicts([record], check))
            history = tuple(attempts)
            agreement = Agreed(
                (*verdicts, make_not_finite(record)) if not record.finite else verdicts, history, 1e9 + record.step
            )
            if not agreement.verdicts:
                continue
            answers = [one.respond(agreement, record) for one in (check, check, self.check())]
            assert answers[0] == answers[1] == answers[2], (
                f"step {record.step}: `respond` returns different responses for equal verdicts: {answers}"
            )
            response = decide(agreement, [answers[0]] if answers[0] else [])
            if response.changes_course:
                line = Attempt(
                    len(attempts) + 2, "step-00000001", action=response.action.name.lower(), kinds=response.kinds
                )
                attempts.append(line)

    def test_check_works_in_a_resumed_run(self, tmp_path: Path) -> None:
        """Check that in a resumed run on two ranks no call of the check fails and no verdict leads to a response."""
        for steps in (LIVED, 2 * LIVED):
            words = (
                *self.chosen,
                *self.settings,
                *self.keep_chosen("parallel=ddp"),
                f"run.steps={steps}",
                "validate.every=2",
            )
            for notes, history in get_pool(2).run(run_training, tmp_path / "run", *words):
                failures = [note for note in notes if "failed" in note]
                assert not failures, failures[0]
                assert not [line for line in history if line.action], (
                    f"the check caused a response in a healthy run: {history[-1]}"
                )

    # --- state and inputs --------------------------------------------------------------------------------------------

    def test_check_restored_from_state_gives_equal_verdicts(self, fault: str) -> None:
        """Check that a check restored from its state returns the same verdicts as the original."""
        records = self.faults[fault](make_healthy())
        for place in (0, FAULT - 1, FAULT, FAULT + 2):
            whole = self.check()
            self.find_verdicts(records[:place], whole)
            state = json.loads(json.dumps(whole.state()))
            again = self.check()
            again.load_state(state)
            assert again.state() == state
            verdicts = [
                [(s, v.to_dict()) for s, v in self.find_verdicts(records[place:], check)] for check in (whole, again)
            ]
            assert verdicts[0] == verdicts[1], (
                f"the check restored from the state of step {place} returns other verdicts"
            )

    def test_check_runs_collectives_only_in_collective(self) -> None:
        """Check that `before_update`, `observe` and `state` run no collectives, and that all ranks have equal state."""
        run = self.run()
        records = FAULTS["not-finite"](make_healthy(FAULT + 5))
        answers = get_pool(2).run(
            observe_records, self.offer.part.build, self.offer.part.name, self.build_config(run), run, records
        )
        assert answers[0][1] == answers[1][1], "`state` of the check differs between ranks"

    def test_unusual_records_raise_no_error(self) -> None:
        check = self.check()
        plain = make_healthy(1)[0]
        strange = [
            replace(plain, mfu=None, rank_seconds=None, rank_phases=None, seconds={}, memory_bytes=0),
            replace(plain, step=2, loss=math.inf, grad_norm=math.inf, finite=False),
            replace(plain, step=3, loss=math.nan, grad_norm=math.nan, tokens=0, tokens_per_second=0.0, finite=False),
            replace(plain, step=4, metrics={"blocks.0/load": [1.0, 2.0], "x": math.nan}, step_seconds=0.0),
            replace(plain, step=5, rank_losses=[1.0, None, math.nan, 2.0]),
            replace(plain, step=6, rank_losses=[None, None]),
            replace(plain, step=3),  # step 3 again, as after a rollback
        ]
        self.find_verdicts(strange, check)

    def test_check_does_not_change_records(self) -> None:
        for fault in self.faults.values():
            records = fault(make_healthy())
            before = copy.deepcopy(records)
            self.find_verdicts(records)
            assert repr(records) == repr(before)  # compares text, because nan differs from itself

    def test_before_run_returns_verdicts(self) -> None:
        assert all(isinstance(verdict, Verdict) for verdict in self.check().before_run())

    def test_observation_interval_is_a_positive_integer(self) -> None:
        every = self.check().every
        assert isinstance(every, int)
        assert every >= 1
