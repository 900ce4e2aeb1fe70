"""`callback=eval` on sharded models: metrics and losses of one process."""

from __future__ import annotations

import json

import pytest
from test_finetune_layouts import KINDS, LAYOUTS, SETTINGS, tokenizer

from gangline_testkit import RealRuns

TASKS = {
    "says": "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
    "generation_kwargs: {until: ['.'], max_gen_toks: 6, do_sample: false}\nmetric_list: [{metric: exact_match}]\n",
    "likely": "output_type: loglikelihood\ndoc_to_text: '{{question}}'\ndoc_to_target: ' It'\n"
    "metric_list: [{metric: acc}, {metric: perplexity}]\n",
}
CUT = {"tp": LAYOUTS["tp"], "pp": ("parallel=pp", "launch.processes=2"), "zero 3": LAYOUTS["zero 3"]}


def test_evaluation_during_training_is_layout_invariant(tmp_path):
    tokenizer(tmp_path)
    rows = [{"question": f"{n}?", "answer": f"It is {n + 1}"} for n in range(5)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (tmp_path / f"{name}.yaml").write_text(f"task: cut_{name}\n{source}{text}")
    asked = ("callback=[eval]", "callback.eval.every=2", "callback.eval.files=[says.yaml,likely.yaml]")
    words = (*SETTINGS, "data.tokenizer=tokenizer.json", *KINDS["chat"], *asked)
    with RealRuns(tmp_path, words, loaded=("gangline_finetune.evaluate.tasks", "lm_eval.evaluator")) as runs:
        runs.environment["HF_DATASETS_CACHE"] = str(tmp_path / "cache")
        runs.train("run.dir=single")
        wanted = runs.read_records("single")
        numbers = {name: value for name, value in wanted[1]["metrics"].items() if name.startswith("eval/")}
        assert any("perplexity" in name for name in numbers)
        assert any("exact_match" in name for name in numbers)
        for name, layout in CUT.items():
            place = name.replace(" ", "-")
            runs.train(f"run.dir={place}", *layout)
            ours = runs.read_records(place)
            for one, other in zip(ours, wanted, strict=True):
                assert one["loss"] == pytest.approx(other["loss"], rel=1e-10), name
            found = {name: ours[1]["metrics"].get(name) for name in numbers}
            assert found == pytest.approx(numbers, rel=1e-4), name
