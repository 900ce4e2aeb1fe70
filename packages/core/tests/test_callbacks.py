"""Callbacks in complete runs: state in checkpoints, order of events, restored weights, reported errors."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from gangline.callback import Callback
from gangline.errors import UserError
from gangline.health import Action, HealthCheck, Verdict
from gangline.train.rank import train
from gangline_testkit import as_installed
from gangline_testkit.pool import get_pool
from gangline_testkit.sessions import open_session, read_lines, train_on_ranks, train_session
from gangline_testkit.toys.previous import PreviousCallback


@pytest.fixture(scope="module", autouse=True)
def toys():
    with as_installed("gangline-toys", "gangline_testkit.toys.plugin"):
        yield


PREVIOUS, VALIDATED = "callback=previous", "validate.every=1"
CLIPPED = ("run.steps=3", "optimizer.clip_norm=0.001")


def held(s) -> dict[str, torch.Tensor]:
    """Return copies of all arrays that this process holds."""
    return {shard.name: shard.local.detach().clone() for shard in s.shards()}


def test_callback_state_reshards_and_weights_are_restored(tmp_path):
    train_session(tmp_path / "plain", VALIDATED, "run.steps=6")
    train_session(tmp_path / "out", PREVIOUS, VALIDATED, "run.steps=4")
    train_on_ranks(2, tmp_path / "out", PREVIOUS, VALIDATED, "run.steps=6", "parallel=ddp")

    records, plain = read_lines(tmp_path / "out", "metrics.jsonl"), read_lines(tmp_path / "plain", "metrics.jsonl")
    losses = [record["validation_loss"] for record in records]
    assert losses == pytest.approx([record["validation_loss"] for record in plain], rel=1e-12)
    before = [record["validation_losses"]["previous/weights"] for record in records]
    assert before[1:] == pytest.approx(losses[:-1], rel=1e-12), "the weights before a step are those after the last"
    assert before[0] != pytest.approx(losses[0], rel=1e-6)
    assert [record["metrics"]["previous/applied"] for record in records] == [1, 2, 3, 4, 5, 6]

    mine, other = open_session(tmp_path / "out", PREVIOUS), open_session(tmp_path / "plain")
    arrays, weights = held(mine), held(other)
    assert mine.callbacks["previous"].state() == {"applied": 6}
    names = [name for name in arrays if name.startswith("callback/")]
    assert len(names) == len(mine.runtime.names())
    for name in [name for name in arrays if name.startswith("model/")]:
        assert torch.allclose(arrays[name], weights[name], rtol=1e-9, atol=0), name


def test_callback_may_be_added_or_removed_on_resume(tmp_path):
    train_session(tmp_path / "out", "run.steps=2")
    train_session(tmp_path / "out", PREVIOUS, "run.steps=2")  # no step is left, so the checkpoint stays as it is
    late = open_session(tmp_path / "out", PREVIOUS, "run.steps=4")
    assert ["lacks arrays of callback=previous" in note for note in late.notes] == [True]
    arrays = held(late)
    for name in late.runtime.names():
        assert torch.equal(arrays[f"callback/previous/weights/{name}"], arrays[f"model/{name}"])
    train(late)
    gone = open_session(tmp_path / "out", "run.steps=4")
    assert ["contains arrays of callback=previous" in note for note in gone.notes] == [True]
    assert not [name for name in held(gone) if name.startswith("callback/")]


class GoesBack(HealthCheck):
    """Health check that requests a rollback at step 4 of the first attempt."""

    def observe(self, record):
        if (record.attempt, record.step) == (1, 4):
            yield Verdict("spike", "step 4", 1.0, "loss 9", Action.ROLL_BACK)


def test_rollback_before_callback_resets_callback_state(tmp_path):
    """Check also the state outside of arrays, which the checkpoint from before the callback does not contain."""
    train_session(tmp_path / "out", "run.steps=2")
    late = open_session(tmp_path / "out", PREVIOUS, "run.steps=5", "checkpoint.every=100")
    late.health["goes-back"] = GoesBack()
    train(late)
    records = read_lines(tmp_path / "out", "metrics.jsonl")
    counted = [(record["step"], record["metrics"].get("previous/applied")) for record in records]
    assert counted == [(1, None), (2, None), (3, 1), (4, 2), (3, 1), (4, 2), (5, 3)]
    assert late.callbacks["previous"].state() == {"applied": 3}


class Events(Callback):
    """Callback that records its events, and raises an error in the event `fails_in`."""

    def __init__(self, fails_in: str = "", error: type[Exception] = ValueError) -> None:
        self.told: list[str] = []
        self.fails_in, self.error = fails_in, error

    def hear(self, event: str) -> None:
        self.told.append(event)
        if event == self.fails_in:
            raise self.error("of all things")


EVENTS = [name for name in vars(Callback) if name.startswith(("begin", "before_", "after_", "end", "on_error"))]
for event in EVENTS:
    setattr(Events, event, lambda self, *_, event=event: self.hear(event))


def with_events(s, callback):
    s.callbacks["events"] = callback
    return s


def test_callback_events_come_in_order(tmp_path):
    s = open_session(tmp_path / "out", "run.steps=2", "validate.every=2")
    events = Events()
    train(with_events(s, events))
    step, whole = (
        ["before_step", "before_clip", "after_step"],
        ["before_validation", "after_validation", "before_save", "after_save"],
    )
    assert events.told == ["begin", *step, *step, *whole, "end"]


class TenTimes(Callback):
    """Callback that multiplies every gradient by ten."""

    def before_clip(self, parameters):
        for parameter in parameters:
            for piece in parameter.pieces:
                piece.tensor.grad *= 10


class NotFinite(Callback):
    """Callback that writes a NaN into a gradient."""

    def before_clip(self, parameters):
        parameters[0].pieces[0].tensor.grad.view(-1)[0] = math.nan


def test_before_clip_changes_gradients_and_their_norm(tmp_path):
    """Clip gradients that are ten times as long: the losses are those of the plain run."""
    plain, changed = open_session(tmp_path / "plain", *CLIPPED), open_session(tmp_path / "changed", *CLIPPED)
    train(plain)
    train(with_events(changed, TenTimes()))
    want, found = read_lines(tmp_path / "plain", "metrics.jsonl"), read_lines(tmp_path / "changed", "metrics.jsonl")
    assert found[0]["grad_norm"] == pytest.approx(10 * want[0]["grad_norm"], rel=1e-12)
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in want], rel=1e-6)
    assert found[1]["loss"] < found[0]["loss"]


def test_step_with_nonfinite_callback_gradients_is_skipped(tmp_path):
    s = open_session(tmp_path / "out", "run.steps=2")
    before = held(s)
    train(with_events(s, NotFinite()))
    (record,) = read_lines(tmp_path / "out", "metrics.jsonl")
    assert not record["finite"]
    assert "not finite" in record["skipped"]
    assert all(array.equal(before[name]) for name, array in held(s).items())


@pytest.mark.parametrize(("event", "error"), [("after_step", ValueError), ("before_save", UserError)])
def test_callback_error_ends_run_and_names_callback(tmp_path, event, error):
    s = open_session(tmp_path / "out", "run.steps=3")
    events = Events(event, error)
    with pytest.raises(error, match="of all things") as raised:
        train(with_events(s, events))
    assert "callback=events" in " ".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert events.told[-2:] == [event, "on_error"]


class Emits(Callback):
    """Callback that returns `value` as a metric each time `event` occurs."""

    def __init__(self, value, event: str = "after_step") -> None:
        self.value = value
        setattr(self, event, lambda *_: {"counted": self.value})


@pytest.mark.parametrize("value", ["abc", None, [1.0, "x"], {"a": 1.0}, torch.ones(2)])
@pytest.mark.parametrize("event", ["after_step", "after_validation"])
def test_non_numeric_callback_metric_is_refused(tmp_path, event, value):
    s = open_session(tmp_path / "out", "run.steps=1", VALIDATED)
    with pytest.raises(TypeError, match=r"callback=events returned .* as metric 'counted'"):
        train(with_events(s, Emits(value, event)))


def test_numpy_number_is_accepted_as_metric(tmp_path):
    s = open_session(tmp_path / "out", "run.steps=1")
    train(with_events(s, Emits(numpy.float32(0.5))))
    assert read_lines(tmp_path / "out", "metrics.jsonl")[0]["metrics"]["events/counted"] == 0.5


@pytest.mark.parametrize("event", ["after_step", "after_validation"])
def test_metric_differing_between_ranks_is_refused(tmp_path, event):
    for said in get_pool(2).run(refused_metric, tmp_path / event, event):
        assert "callback=events returned 1.0 as its metric 'counted' on rank 1 and 0.0 on rank 0" in said


def refused_metric(run_dir, event: str) -> str:
    """Return the error message of a run in which each rank emits its own number."""
    s = open_session(run_dir, "run.steps=2", "parallel=ddp", VALIDATED)
    with pytest.raises(ValueError) as raised:
        train(with_events(s, Emits(s.comms.rank, event)))
    return str(raised.value)


def test_failed_validation_restores_weights(tmp_path, monkeypatch):
    s = open_session(tmp_path / "out", PREVIOUS, "run.steps=1", VALIDATED)
    kept, evaluate = {}, s.runtime.evaluate

    def fails_the_second_time(batches):
        if kept:
            assert not all(torch.equal(kept[name], array) for name, array in held(s).items())
            raise RuntimeError("no more")
        kept.update(held(s))
        return evaluate(batches)

    monkeypatch.setattr(s.runtime, "evaluate", fails_the_second_time)
    with pytest.raises(RuntimeError, match="no more"):
        train(s)
    for name, array in held(s).items():
        assert torch.equal(array, kept[name]), name


def test_array_name_outside_callback_prefix_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(PreviousCallback, "place", property(lambda self: "callback/other", lambda self, place: None))
    with pytest.raises(ValueError, match="callback=previous has an array 'callback/other/weights/"):
        open_session(tmp_path / "out", PREVIOUS)
