"""Runs that start with the weights and optimizer state of another run's checkpoint."""

from __future__ import annotations

import json
import shutil

import pytest

from gangline.config.check import find_problems
from gangline.config.compose import compose_one
from gangline.config.resume import continue_run
from gangline.errors import UserError
from gangline.run import attempts
from gangline.run.attempts import Attempt
from gangline.run.directory import RunDirectory
from gangline_testkit.sessions import open_session, read_lines, train_on_ranks, train_session


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """Return the directory of a run of four steps, with checkpoints at steps 2 and 4."""
    run_dir = tmp_path_factory.mktemp("parent") / "run"
    train_session(run_dir, "run.steps=4")
    return run_dir


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Return the curve of steps 5 and 6 of the same run, which was resumed after step 4."""
    run_dir = tmp_path_factory.mktemp("resumed") / "run"
    train_session(run_dir, "run.steps=4")
    train_session(run_dir, "run.steps=6")
    return curve(run_dir)[4:]


def curve(run_dir):
    return [(line["step"], line["first_sample"], line["loss"], line["grad_norm"]) for line in read(run_dir)]


def read(run_dir):
    return read_lines(run_dir, "metrics.jsonl")


def test_first_steps_with_weights_match_resume(parent, resumed, tmp_path):
    train_session(tmp_path / "out", f"run.weights={parent}", "run.steps=6")
    assert curve(tmp_path / "out") == resumed
    facts = json.loads((tmp_path / "out/provenance.json").read_text())["weights"]
    assert facts == {"run": str(parent), "checkpoint": "step-00000004", "step": 4, "sample": resumed[0][1]}
    assert [line for line in read_lines(tmp_path / "out", "events.jsonl") if line["event"] == "weights"]
    assert "weights of" in read_lines(tmp_path / "out", "attempts.jsonl")[0]["why"]


def test_first_steps_on_two_ranks_match_resume(parent, resumed, tmp_path):
    train_on_ranks(2, tmp_path / "out", f"run.weights={parent}", "run.steps=6", "parallel=ddp")
    for found, want in zip(curve(tmp_path / "out"), resumed, strict=True):
        assert found == pytest.approx(want, rel=1e-12)


def test_skipped_samples_of_parent_run_stay_skipped(parent, tmp_path):
    copy = shutil.copytree(parent, tmp_path / "copy")
    skip = Attempt(2, "step-00000002", 400, skipped_from=0, action="roll_back", step=4)
    attempts.append(copy, skip)
    words = (f"run.weights={copy}/step-00000002", "run.steps=4")
    train_session(tmp_path / "out", *words)
    before = curve(tmp_path / "out")
    assert before[0][1] == 400
    again = open_session(tmp_path / "out", f"run.weights={copy}", "run.steps=5")
    assert again.step == 4
    assert [(line.skipped_from, line.skipped) for line in again.history if line.skipped] == [(0, 400)]


def test_run_from_weights_may_change_learning_rate(parent, resumed, tmp_path):
    train_session(tmp_path / "out", f"run.weights={parent}", "run.steps=6", "optimizer.learning_rate=0.0001")
    assert curve(tmp_path / "out")[0] == resumed[0]
    assert curve(tmp_path / "out")[1] != resumed[1]
    assert {line["learning_rate"] for line in read(tmp_path / "out")} == {0.0001}


def test_weights_option_accepts_a_checkpoint_path(parent, tmp_path):
    train_session(tmp_path / "out", f"run.weights={parent}/step-00000002", "run.steps=4")
    assert curve(tmp_path / "out") == curve(parent)[2:]


def test_resume_before_first_save_reuses_initial_checkpoint(parent, tmp_path):
    """Open the run again when its parent's newest checkpoint is a later one: the run still starts from step 2."""
    words = (f"run.weights={parent}/step-00000002", "run.steps=4", "checkpoint=off")
    train_session(tmp_path / "out", *words)
    again = open_session(tmp_path / "out", f"run.weights={parent}", *words[1:])
    assert again.step == 2


def test_reordered_data_is_read_from_first_sample(parent, tmp_path):
    train_session(tmp_path / "out", f"run.weights={parent}", "run.steps=5", "run.seed=8")
    assert [(line["step"], line["first_sample"]) for line in read(tmp_path / "out")] == [(5, 0)]


def test_run_without_steps_left_is_refused(parent, tmp_path):
    with pytest.raises(UserError, match=r"has done 4 steps, and run.steps=4"):
        open_session(tmp_path / "out", f"run.weights={parent}", "run.steps=4")


def test_weights_of_another_model_are_refused(parent, tmp_path):
    with pytest.raises(UserError, match="is of another model"):
        open_session(tmp_path / "out", f"run.weights={parent}", "run.steps=6", "model.dim=32")


def test_another_optimizer_is_refused_before_anything_starts(parent):
    run = compose_one([f"from={parent}", f"weights={parent}", "optimizer=lion", "run.steps=6"])
    assert "trained with optimizer=adamw, and this run has optimizer=lion" in find_problems(run)[0].what


def test_missing_run_is_refused_before_anything_starts():
    assert "there is no run directory" in find_problems(compose_one(["weights=nowhere"]))[0].what


def test_from_option_copies_configuration_without_weights(parent, tmp_path):
    RunDirectory.create(compose_one([f"from={parent}", f"weights={parent}", f"run.dir={tmp_path}/out"])).unlock()
    assert RunDirectory.open(tmp_path / "out").run().job.weights == str(parent)
    assert compose_one([f"from={tmp_path}/out"]).job.weights is None


def test_refused_resume_suggests_weights_option(parent):
    content = RunDirectory.open(parent).read_content()
    with pytest.raises(UserError) as caught:
        continue_run("a", content, ["optimizer.learning_rate=0.5"])
    assert "train from=a weights=a optimizer.learning_rate=0.5" in str(caught.value)
    assert "(new weights):  train from=a optimizer.learning_rate=0.5" in str(caught.value)
    with pytest.raises(UserError) as caught:
        continue_run("a", content, ["optimizer=lion"])
    assert "weights=a" not in str(caught.value)
