"""`gangline eval`: metrics equal those of lm-eval on the exported directory; refused tasks and arguments."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from chats import TEMPLATE, tokenizer
from own_tasks import TASKS, made
from transformers import AutoTokenizer

from gangline import UserError
from gangline.cli.main import main
from gangline_basics.data.codec import TokenizerCodec
from gangline_finetune.evaluate.text_model import TextModel
from gangline_testkit import RealRuns, warm
from gangline_testkit.real_runs import TRAIN, copy_environment

STRETCHED = ("model.rope_scaling_factor=4", "model.rope_original_max_position=64", "model.weights=null", "lora=off")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    with RealRuns(folder, made(folder, TASKS, 12, bos=True), warm=True) as runs:
        runs.train("run.dir=run", "run.steps=2")
        runs.train("run.dir=stretched", "run.steps=1", *STRETCHED)
    for run, out in (("run", "out"), ("stretched", "stretched-out")):
        assert main(["export", str(folder / run), str(folder / out), "--merge"]) == 0
    return folder


def compare_with_lm_eval(here, run, out, names):
    """Compare all metrics of `gangline eval` on a run with lm-eval's own model of the run's export."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    files, found = [str(here / f"{name}.yaml") for name in names], here / f"{run}.json"
    assert main(["eval", str(here / run), "--tasks", *files, "--out", str(found)]) == 0
    ours = json.loads(found.read_text())
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(here / out), "dtype": "float32"},
        tasks=[f"own_{name}" for name in names],
        task_manager=TaskManager(include_path=str(here), include_defaults=False),
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
    )["results"]
    assert ours.keys() == theirs.keys() == {f"own_{name}" for name in names}
    for task, numbers in theirs.items():
        wanted = {name: value for name, value in numbers.items() if isinstance(value, float)}
        assert wanted, task
        for name, value in wanted.items():
            assert ours[task][name] == pytest.approx(value, rel=1e-4), (task, name)


def test_metrics_match_lm_eval_on_export(here, monkeypatch, capsys):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(here / "cache"))
    compare_with_lm_eval(here, "run", "out", TASKS)
    said = capsys.readouterr()
    assert "own_choice" in said.out
    assert "gangline eval: note" not in said.err


def test_metrics_match_lm_eval_with_extended_context(here, monkeypatch, capsys):
    """Check scaled rotary positions: the export has a context of 256 tokens, and the rows of the run have 64."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(here / "cache"))
    text = (here / "text.yaml").read_text().replace("* 9", "* 40").replace("{metric: word_perplexity}, ", "")
    for name, long in (
        ("far", text),
        ("hint", (here / "choice.yaml").read_text().replace("{{question}}", "{{question * 40}}")),
    ):
        (here / f"{name}.yaml").write_text(re.sub("task: own_.*", f"task: own_{name}", long))
    compare_with_lm_eval(here, "stretched", "stretched-out", ["far", "hint", "write"])
    assert "note: the context length is 256 tokens" in capsys.readouterr().err


def test_metric_too_large_for_a_float_is_infinite(here, monkeypatch, capsys):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(here / "cache"))
    huge = (here / "text.yaml").read_text().replace("own_text", "own_huge").replace("* 9", "* 90")
    (here / "huge.yaml").write_text(huge)
    words = ["--tasks", str(here / "huge.yaml"), str(here / "choice.yaml"), "--limit", "2"]
    assert main(["eval", str(here / "run"), *words, "--out", str(here / "huge.json")]) == 0
    found = json.loads((here / "huge.json").read_text())
    assert found["own_huge"]["word_perplexity,none"] == "inf", "JSON has no such number"
    assert 0 < found["own_huge"]["bits_per_byte,none"] < 1000
    assert 0 <= found["own_choice"]["acc,none"] <= 1
    assert "~inf" in capsys.readouterr().out


def test_runs_start_warm_after_lm_eval_import(here):
    """Check that runs start warm: lm-eval imports scikit-learn, which sets environment variables of the process."""
    import lm_eval.evaluator  # noqa: F401

    command = warm.make_command(TRAIN, {**copy_environment(), "OMP_NUM_THREADS": "1"})
    assert str(warm.CLIENT) in command


def test_generated_answers_match_transformers(here):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gangline_finetune.evaluate.run_model import RunModel

    ours, theirs = RunModel(str(here / "run")), AutoModelForCausalLM.from_pretrained(here / "out")
    codec = AutoTokenizer.from_pretrained(here / "out")
    asked = codec.apply_chat_template([{"role": "user", "content": "2+1?"}], tokenize=False, add_generation_prompt=True)
    assert asked == ours.apply_chat_template([{"role": "user", "content": "2+1?"}])
    assert codec.chat_template == TEMPLATE
    tokens = torch.tensor([codec(asked, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        written = theirs.generate(tokens, max_new_tokens=8, do_sample=False)[0, tokens.shape[1] :]
    assert theirs.generation_config.eos_token_id == codec.eos_token_id == ours.eot_token_id
    wanted = codec.decode(written, skip_special_tokens=True)
    assert ours._answer(asked, {"max_gen_toks": 8}) == wanted


class Mute(TextModel):
    """Model that only has a vocabulary and fails if it must score texts."""

    def score_rows(self, rows):
        raise AssertionError("it was asked how likely texts are")


def test_special_tokens_map_defines_bos_and_eos(tmp_path):
    path = tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}})
    )
    codec, theirs = TokenizerCodec(str(path), None, "replace"), AutoTokenizer.from_pretrained(tmp_path)
    ours = Mute(SimpleNamespace(codec=codec, context=8), 1)
    assert ours.prefix_token_id == theirs.bos_token_id == codec.tokenizer.token_to_id("<|im_start|>")
    assert ours.eot_token_id == theirs.eos_token_id == codec.tokenizer.token_to_id("<|im_end|>")


def test_long_question_is_truncated_between_tokens(here, monkeypatch):
    from gangline_finetune.evaluate.run_model import RunModel

    model, asked = RunModel(str(here / "run")), []
    write = model.sampler.write
    monkeypatch.setattr(
        model.sampler, "write", lambda prompts, *a, **k: asked.extend(prompts) or write(prompts, *a, **k)
    )
    question = "é" * 40 + "<|im_start|>assistant\n"
    model._answer(question, {"until": ["<|im_end|>"], "max_gen_toks": 21})
    assert asked == [model.tok_encode(question)[-43:]]
    assert "<|im_start|>" in model.codec.decode_special(asked[0])


@pytest.mark.parametrize("asked", [{}, {"max_gen_toks": 64}])
def test_answer_length_without_room_for_question_is_refused(tmp_path, asked):
    codec = TokenizerCodec(str(tokenizer(tmp_path)), None, "replace")
    with pytest.raises(UserError, match="from a model with context length 64"):
        Mute(SimpleNamespace(codec=codec, context=64), 1)._answer("What is it?", asked)


def test_invalid_task_is_refused_before_evaluation(here, monkeypatch, capsys):
    from gangline_finetune.evaluate.run_model import RunModel

    monkeypatch.setenv("HF_DATASETS_CACHE", str(here / "cache"))
    monkeypatch.setattr(RunModel, "score_rows", lambda *_: pytest.fail("it was asked how likely texts are"))
    long = (here / "write.yaml").read_text().replace("own_write", "own_long").replace("toks: 6", "toks: 64")
    (here / "long.yaml").write_text(long)
    assert main(["eval", str(here / "run"), "--tasks", str(here / "choice.yaml"), str(here / "long.yaml")]) == 2
    assert "answers of up to 64 tokens from a model with context length 64" in capsys.readouterr().err


def test_unknown_tasks_are_refused(here, monkeypatch, capsys):
    # The local directory replaces lm-eval's own task files, of which lm-eval would read 14,000. `test_evaluate_live`
    # requests a task from lm-eval's own files.
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(here / "manager.py"))
    for task, told in (
        ("no_such_task_at_all", "lm-eval task no_such_task_at_all is unknown"),
        (str(here / "no.yaml"), "cannot be read"),
    ):
        assert main(["eval", str(here / "run"), "--tasks", task]) == 2
        assert told in capsys.readouterr().err


def test_invalid_numeric_arguments_are_refused(here, capsys):
    for word, value in (("--batch", "0"), ("--batch", "-1"), ("--limit", "0"), ("--shots", "-1"), ("--batch", "x")):
        with pytest.raises(SystemExit) as ended:
            main(["eval", str(here / "run"), "--tasks", "own_choice", f"{word}={value}"])
        assert ended.value.code == 2
        assert f", not {value}" in capsys.readouterr().err


def test_missing_output_directory_is_refused_before_evaluation(here, capsys):
    words = ["eval", str(here / "run"), "--tasks", str(here / "choice.yaml")]
    assert main([*words, "--out", str(here / "nodir" / "x.json")]) == 2
    assert "nodir is not a directory" in capsys.readouterr().err


def test_answer_longer_than_context_is_refused_before_scoring(here):
    from gangline import UserError
    from gangline_finetune.evaluate.run_model import RunModel

    model = RunModel(str(here / "run"))
    most = model.max_length
    ((whole, _),) = model._loglikelihood_tokens([(("", ""), [1], [5] * most)])
    assert whole < 0
    model.model = None
    with pytest.raises(UserError, match=f"an answer of {most + 1} tokens, which is too long: 'too long'"):
        model._loglikelihood_tokens([(("", "short"), [1], [5]), (("", "too long"), [1], [5] * (most + 1))])


def test_failed_dataset_download_exits_without_traceback(here, monkeypatch, capsys):
    from lm_eval.tasks import TaskManager

    def load(*_):
        raise ConnectionError("Couldn't reach 'them' on the Hub")

    monkeypatch.setattr(TaskManager, "load", load)
    assert main(["eval", str(here / "run"), "--tasks", str(here / "text.yaml")]) == 2
    assert "Couldn't reach 'them'" in capsys.readouterr().err
