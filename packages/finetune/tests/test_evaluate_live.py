"""`callback=eval`: metrics during a run equal those of `gangline eval` after the run."""

from __future__ import annotations

import json

import pytest
from own_tasks import LM_EVAL, TASKS, made

from gangline.cli.main import main
from gangline_testkit import RealRuns

MORE = {
    "likely": """
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "I"
metric_list: [{metric: acc}, {metric: perplexity}]
"""
}
WORDS = ("run.steps=4", "validate.every=null", "callback=[eval]", "callback.eval.every=2", "callback.eval.batch=3")
LAYOUTS = {"single": (), "ddp": ("parallel=ddp", "launch.processes=2")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    tasks = TASKS | MORE
    long = TASKS["write"].replace("max_gen_toks: 6", "max_gen_toks: 64")
    files = ",".join(f"{name}.yaml" for name in tasks)
    with RealRuns(folder, (*made(folder, tasks | {"long": long}, 11), *WORDS), loaded=LM_EVAL) as found:
        found.environment["HF_DATASETS_CACHE"] = str(folder / "cache")
        found.asked = (f"callback.eval.files=[{files}]",)
        found.files = [str(folder / f"{name}.yaml") for name in tasks]
        yield found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_live_metrics_match_gangline_eval(runs, layout, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(runs.directory / "cache"))
    runs.train(f"run.dir={layout}", *runs.asked, *LAYOUTS[layout])
    records = runs.read_records(layout)
    asked = [[name for name in record["metrics"] if name.startswith("eval/")] for record in records]
    assert [bool(names) for names in asked] == [False, True, False, True]
    here = runs.directory
    assert main(["eval", str(here / layout), "--tasks", *runs.files, "--out", str(here / f"{layout}.json")]) == 0
    after = json.loads((here / f"{layout}.json").read_text())
    compared = 0
    for task, numbers in after.items():
        for key, value in numbers.items():
            metric = key.removesuffix(",none")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                assert records[-1]["metrics"][f"eval/{task}/{metric}"] == pytest.approx(value, rel=1e-4), (task, key)
                compared += 1
    assert compared >= 7
    assert compared == len(asked[-1])


def test_live_evaluation_does_not_change_training(runs):
    runs.train("run.dir=asked", *runs.asked, "callback.eval.limit=2")
    runs.train("run.dir=not", *runs.asked, "callback.eval.every=100")  # the run ends before its first evaluation
    for ours, theirs in zip(runs.read_records("asked"), runs.read_records("not"), strict=True):
        assert (ours["loss"], ours["grad_norm"]) == (theirs["loss"], theirs["grad_norm"])


def test_invalid_eval_tasks_are_refused_before_first_step(runs):
    said = runs.expect_refusal("run.dir=no")
    assert "callback=eval has no tasks" in said, said
    said = runs.expect_refusal("run.dir=no", "callback.eval.files=[gone.yaml]")
    assert "gone.yaml cannot be read" in said, said
    said = runs.expect_refusal("run.dir=long", "callback.eval.files=[long.yaml]")
    assert "answers of up to 64 tokens from a model with context length 64" in said, said
    assert runs.read_records("long") == []
    said = runs.expect_refusal("run.dir=no", "callback.eval.tasks=[no_such_task_at_all]", *LAYOUTS["ddp"])
    assert said.count("the lm-eval task no_such_task_at_all is unknown") == 1, said
