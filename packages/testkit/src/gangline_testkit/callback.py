"""Conformance suite for callbacks (group `callback`): complete runs in several layouts, and resumes."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor

from gangline.callback import Callback
from gangline.plugin.registry import installed
from gangline.record import StepRecord
from gangline.shard import is_of_model
from gangline.train.rank import train
from gangline.train.session import Session
from gangline_testkit.claims import LAYOUT, mark_capability
from gangline_testkit.compare import Held, assemble, compare_all
from gangline_testkit.health_ranks import forbid_collectives
from gangline_testkit.install import as_installed
from gangline_testkit.pool import get_pool
from gangline_testkit.sessions import open_session
from gangline_testkit.suite import PartSuite

ONE = "parallel=single"
LAYOUTS = {"data parallel": (2, "parallel=ddp"), "sharded by rows": (2, "parallel=rows")}
HALF, STEPS = 2, 4
FEW = "batch.global_size=4"
ROUNDING = 1e-9  # relative tolerance for results in float64

_straight: dict[str, list[CallbackRun]] = {}  # cached results of runs in one process, by part and settings


@dataclass
class CallbackRun:
    """Records and notes of a run on one rank, and the rank's shards at the end of the run."""

    records: list[StepRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights: list[Held] = field(default_factory=list)
    arrays: list[Held] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # global shape of every array of the run
    boxes: list[str] = field(default_factory=list)  # shards of the callback that are not in the registry
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def losses(self) -> list[tuple[int, float, float, float | None]]:
        return [(record.step, record.loss, record.grad_norm, record.validation_loss) for record in self.records]


def run_callback(run_dir: Path, name: str, *settings: str) -> CallbackRun:
    """Train on this rank until the run is done, and return its records and final shards."""
    with ExitStack() as stack:
        if "rows" not in installed().get_offers("parallel"):
            stack.enter_context(as_installed("gangline-toys", "gangline_testkit.toys.plugin"))
        s = open_session(run_dir, *settings)
        callback_run = CallbackRun(notes=list(s.notes))
        tell = s.reporter.record
        s.reporter.record = lambda record: callback_run.records.append(record) or tell(record)  # type: ignore[method-assign, func-returns-value]
        train(s)
        return _collect(s, name, callback_run)


def _collect(s: Session, name: str, found: CallbackRun) -> CallbackRun:
    found.shapes = {array: s.registry[array].shape for array in s.registry}
    found.weights = [(shard.name, shard.offset, shard.local.detach().clone()) for shard in s.runtime.shards()]
    callback = s.callbacks.get(name)
    for shard in callback.shards() if callback else ():
        rank_boxes = [(box, primary) for box, primary in s.registry.list_rank_boxes(shard.name, s.comms.rank)]
        if (shard.box, shard.primary) not in rank_boxes:
            found.boxes.append(f"{shard.name} at {shard.offset}")
        found.arrays.append((shard.name, shard.offset, shard.local.detach().clone()))
    found.state = json.loads(json.dumps(callback.state())) if callback else {}
    return found


def end_by_error(run_dir: Path, name: str, *settings: str) -> None:
    """Train to the end, then call the callback's `on_error` on this rank with collectives forbidden."""
    s = open_session(run_dir, *settings)
    train(s)
    with forbid_collectives():
        s.callbacks[name].on_error(RuntimeError("lost the connection to another rank"))


class CallbackSuite(PartSuite):
    """Conformance suite for callbacks; subclass it with ``choice = "callback=mine"``."""

    CLAIMS: ClassVar[dict[str, str]] = {
        LAYOUT: "Runs in every layout match one process (implied unless `Part.layout_dependent` is set).",
        "watches": "The callback changes no bit of the losses and weights of a run.",
    }

    @property
    def words(self) -> tuple[str, ...]:
        """Settings of a short run with the callback, with a validation and a save in the middle."""
        return (FEW, *self.settings, f"run.steps={STEPS}", f"validate.every={HALF}", f"checkpoint.every={HALF}")

    def run_on_ranks(self, run_dir: Path, *more: str, world: int = 1, without: bool = False) -> list[CallbackRun]:
        """Run on `world` ranks, and return the results of each rank. without: whether to run without the callback."""
        own = (FEW, f"run.steps={STEPS}", f"validate.every={HALF}") if without else (*self.chosen, *self.words)
        return get_pool(world).run(run_callback, run_dir, self.offer.part.name, *own, *self.keep_chosen(*more))

    def run_straight(self, place: Path) -> list[CallbackRun]:
        """Return the cached results of one uninterrupted run in one process. place: run directory."""
        key = repr((self.offer.part, self.words))
        if key not in _straight:
            _straight[key] = self.run_on_ranks(place, ONE)
        return _straight[key]

    def assemble_arrays(self, callback_runs: list[CallbackRun]) -> dict[str, Tensor]:
        """Return the callback's full arrays by name."""
        own = {name: shape for name, shape in callback_runs[0].shapes.items() if name.startswith(f"{self.place}/")}
        return assemble([rank.arrays for rank in callback_runs], own)

    @property
    def place(self) -> str:
        return f"callback/{self.offer.part.name}"

    def gather_weights(self, callback_runs: list[CallbackRun]) -> dict[str, Tensor]:
        """Return the full weights of the run by name."""
        own = {name: shape for name, shape in callback_runs[0].shapes.items() if is_of_model(name)}
        return assemble([rank.weights for rank in callback_runs], own)

    def test_build_returns_a_callback(self) -> None:
        run = self.run()
        assert isinstance(self.build(self.build_config(run), run), Callback)

    @mark_capability(LAYOUT)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_run_with_the_callback_matches_one_process(self, layout: str, tmp_path: Path) -> None:
        """Check that losses, metrics, arrays and state keys match one process; ranks have equal metrics and state."""
        world, choice = LAYOUTS[layout]
        (alone,) = one = self.run_straight(tmp_path / "one")
        callback_runs = self.run_on_ranks(tmp_path / "several", choice, world=world)
        for rank in callback_runs:
            assert not rank.boxes, f"the registry has no box for the callback's shard {rank.boxes[0]}"
            assert rank.state == callback_runs[0].state, "`state` of the callback differs between ranks"
            for record, first in zip(rank.records, callback_runs[0].records, strict=True):
                assert record.metrics == first.metrics, (
                    f"step {record.step}: the metrics of the callback differ between ranks"
                )
        for record, want in zip(callback_runs[0].records, alone.records, strict=True):
            assert record.metrics.keys() == want.metrics.keys()
            for name, value in want.metrics.items():
                assert record.metrics[name] == pytest.approx(value, rel=ROUNDING), (
                    f"step {record.step}: the metric {name} differs from one process"
                )
        losses = [pytest.approx(loss[:3], rel=ROUNDING) for loss in alone.losses]
        assert [loss[:3] for loss in callback_runs[0].losses] == losses
        compare_all("array", self.assemble_arrays(callback_runs), self.assemble_arrays(one), ROUNDING)
        assert callback_runs[0].state.keys() == alone.state.keys()

    def test_resumed_run_with_the_callback_is_bit_identical(self, tmp_path: Path) -> None:
        (straight,) = whole = self.run_straight(tmp_path / "straight")
        self.run_on_ranks(tmp_path / "resumed", ONE, f"run.steps={HALF}")
        (resumed,) = again = self.run_on_ranks(tmp_path / "resumed", ONE)
        assert resumed.losses == straight.losses[HALF:]
        assert [r.metrics for r in resumed.records] == [r.metrics for r in straight.records[HALF:]]
        compare_all("array", self.assemble_arrays(again), self.assemble_arrays(whole), 0)
        assert resumed.state == straight.state

    def test_callback_can_be_added_and_removed_at_a_resume(self, tmp_path: Path) -> None:
        """Check that a run that was saved without the callback resumes with the callback, and the reverse."""
        self.run_on_ranks(tmp_path / "run", ONE, f"run.steps={HALF}", without=True)
        (callback_run,) = self.run_on_ranks(tmp_path / "run", ONE)
        assert [record.step for record in callback_run.records] == list(range(HALF + 1, STEPS + 1))
        self.run_on_ranks(tmp_path / "run", ONE, f"run.steps={STEPS + 1}", without=True)

    def test_may_drop_returns_only_arrays_it_was_given(self) -> None:
        run = self.run()
        callback = self.build(self.build_config(run), run)
        callback.place = self.place
        names = [f"{self.place}/unheard-of/{name}" for name in ("a", "b")]
        first, again = (list(callback.may_drop(list(names))) for _ in range(2))
        assert set(first) <= set(names), f"`may_drop` returns arrays that it was not given: {first}"
        assert first == again, f"`may_drop` returns other arrays on the second call: {first}, {again}"

    def test_on_error_runs_no_collectives(self, tmp_path: Path) -> None:
        words = (*self.chosen, *self.words, *self.keep_chosen("parallel=ddp"))
        get_pool(2).run(end_by_error, tmp_path / "run", self.offer.part.name, *words)

    @mark_capability("watches")
    def test_run_is_bit_identical_without_the_callback(self, tmp_path: Path) -> None:
        (one,) = callback_runs = self.run_straight(tmp_path / "with")
        (want,) = without = self.run_on_ranks(tmp_path / "without", ONE, without=True)
        assert one.losses == want.losses
        compare_all("weight", self.gather_weights(callback_runs), self.gather_weights(without), 0)
