"""`data=preferences` and `dpo=on`: preference pairs, and a loss equal to that of TRL and transformers.

The transformers loss is computed with the exported model.
"""

from __future__ import annotations

import re

import numpy
import pytest
import torch
from chats import TEMPLATE, tokenizer, write
from small_models import llama, opened

from gangline.cli.main import main
from gangline.config.compose import compose_one
from gangline_finetune.dpo.modules import compute_dpo_losses, mark_won_pairs
from gangline_finetune.dpo.source import build
from gangline_testkit import RealRuns

BETA = 0.3
SETTINGS = (
    "batch.global_size=8",
    "batch.sequence_length=120",
    "run.steps=4",
    "run.sample=0",
    "track=[jsonl]",
    "track.jsonl.figure=false",
    "precision=fp32",
    "optimizer.learning_rate=0.01",
    "schedule=constant",
    "validate.every=4",
    "data=preferences",
    "data.validation_fraction=0.2",
    "dpo=on",
    f"dpo.beta={BETA}",
    "lora=on",
)


def pairs(count: int = 40) -> list[dict]:
    return [
        {"prompt": f"{n % 9}+{n % 4}?", "chosen": f"It is {n % 9 + n % 4}.", "rejected": "No idea."}
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    base = llama(folder / "base")
    path, file = tokenizer(folder / "base"), write(folder / "pairs.jsonl", pairs())
    with RealRuns(folder, SETTINGS) as found:
        found.settings = (*SETTINGS, *base, f"data.path={file}", f"data.tokenizer={path}")
        yield found


def source(runs, *more, split="train"):
    run = compose_one([*runs.settings, *more])
    assert not run.data.check(run)
    return build(run.data, run, split)


def log_likelihoods(model, of) -> torch.Tensor:
    """Compute the log-likelihoods (pairs, 2) with transformers, one chat at a time."""
    found = []
    for pair in of.pairs:
        for side in pair:
            tokens = torch.tensor(side.tokens.astype("int64"))[None]
            with torch.no_grad():
                each = model(tokens).logits[0, :-1].double().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            found.append(each[torch.tensor(side.loss_mask[1:])].sum())
    return torch.stack(found).view(-1, 2)


def test_validation_loss_matches_exported_model_in_transformers(runs):
    runs.train("run.dir=a")
    here = runs.directory
    assert main(["export", str(here / "a"), str(here / "merged"), "--merge"]) == 0
    of = source(runs, split="validation")
    assert len(of.pairs) == 8
    now, first = (log_likelihoods(opened(here / name), of) for name in ("merged", "base"))
    losses, margins = compute_dpo_losses(now, first, BETA)
    record = runs.read_records("a")[-1]
    assert record["validation_loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    assert margins.mean() > 0.1, "training changed nothing"
    begin = runs.read_records("a")[0]
    assert begin["loss"] == pytest.approx(torch.tensor(2.0).log().item(), rel=1e-5)
    assert record["metrics"]["dpo_pairs"] == 8


def test_resume_keeps_initial_reference_model(runs):
    runs.train("run.dir=whole", "checkpoint.every=2", "run.steps=4")
    runs.train("run.dir=parted", "run.steps=2")
    runs.train("resume=parted", "run.steps=4")
    assert runs.read_curve("parted") == runs.read_curve("whole")
    runs.train("from=whole", "weights=whole/step-00000002", "run.dir=branch", "run.steps=4")
    assert runs.read_curve("branch") == runs.read_curve("whole")[2:]
    (kept,) = (path for path in (runs.directory / "parted").glob("first-model-*.npy") if len(numpy.load(path)) == 32)
    for spoil in (lambda: kept.write_bytes(b""), lambda: numpy.save(kept, numpy.zeros((3, 2))), kept.unlink):
        spoil()
        said = runs.expect_refusal("resume=parted", "run.steps=6")
        assert "reference model" in said
    assert "validate.sets.NAME=null" in said


def test_two_ranks_match_one_rank(runs):
    runs.train("run.dir=two", "parallel=ddp", "launch.processes=2")
    runs.train("run.dir=one")
    for ours, theirs in zip(runs.read_curve("two"), runs.read_curve("one"), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)


def test_loss_matches_trl(runs, tmp_path, monkeypatch):
    """Compare with TRL's trainer on the same pairs; the policy differs from the reference, as after some steps."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    monkeypatch.setenv("WANDB_DISABLED", "true")
    of = source(runs, "data.validation_fraction=0")
    here = runs.directory
    base, policy = opened(here / "base"), opened(here / "base")
    torch.manual_seed(3)
    for parameter in policy.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    theirs = AutoTokenizer.from_pretrained(here / "base", chat_template=TEMPLATE)
    rows = [
        {
            "prompt": [{"role": "user", "content": pair["prompt"]}],
            "chosen": [{"role": "assistant", "content": pair["chosen"]}],
            "rejected": [{"role": "assistant", "content": pair["rejected"]}],
        }
        for pair in pairs()
    ]
    asked = DPOConfig(
        str(tmp_path),
        beta=BETA,
        per_device_train_batch_size=40,
        report_to="none",
        use_cpu=True,
        bf16=False,
        max_length=None,
    )
    trainer = DPOTrainer(policy, base, asked, train_dataset=Dataset.from_list(rows), processing_class=theirs)
    inputs = next(iter(trainer.get_train_dataloader()))
    policy.eval()
    with torch.no_grad():
        wanted = trainer.compute_loss(policy, inputs)
    losses, _ = compute_dpo_losses(log_likelihoods(policy, of), log_likelihoods(base, of), BETA)
    assert wanted.item() == pytest.approx(losses.mean().item(), rel=1e-4)


def test_empty_or_equal_pairs_are_refused_with_line(runs):
    bad = {
        "line 2": [pairs()[0], {**pairs()[1], "rejected": pairs()[1]["chosen"]}],
        "is empty": [{**pairs()[0], "chosen": " "}],
        "the field 'rejected' of line 1": [{"prompt": "a", "chosen": "b"}],
        "is empty.": [],
        "the prompt of line 1": [{"chosen": "a", "rejected": "b"}],
    }
    for told, rows in bad.items():
        file = write(runs.directory / "bad.jsonl", rows)
        run = compose_one([*runs.settings, f"data.path={file}"])
        assert told in "\n".join(map(str, run.data.check(run))), told
    run = compose_one([word for word in runs.settings if not word.startswith("dpo")])
    assert "dpo=on" in str(run.data.check(run)[0])
    assert "longer" in runs.expect_refusal("run.dir=no", "batch.sequence_length=40")


def test_chats_that_repeat_prompt_match_bare_answers(runs):
    system, asked = {"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}
    yes, no = ({"role": "assistant", "content": text} for text in ("2", "3"))
    rows = {
        "bare": {"prompt": [system, asked], "chosen": [yes], "rejected": [no]},
        "whole": {"prompt": [system, asked], "chosen": [system, asked, yes], "rejected": [system, asked, no]},
        "text": {"prompt": "1+1?", "chosen": [system, asked, yes], "rejected": [system, asked, no]},
        "one": {"prompt": "1+1?", "chosen": [system, asked, yes], "rejected": "3"},
    }
    file = runs.directory / "whole.jsonl"
    found = {}
    for name, row in rows.items():
        write(file, [row])
        ((chosen, rejected),) = source(runs, f"data.path={file}", "data.validation_fraction=0").pairs
        found[name] = [(side.tokens.tolist(), side.loss_mask.tolist()) for side in (chosen, rejected)]
    assert all(pair == found["bare"] for pair in found.values())
    assert sum(found["bare"][0][1]) == 2, "the answer and its end"
    more = [{"role": "user", "content": "sure?"}, yes]
    for told, row in {
        "chosen and rejected of line 1 of .* do not match the prompt": {**rows["text"], "prompt": "1+2?"},
        "chosen of line 1 of .* must begin and end with an answer": {
            "chosen": [asked, no, *more],
            "rejected": [asked, no, {"role": "user", "content": "really?"}, yes],
        },
        "Roles after the prompt: assistant, user\\.": {**rows["bare"], "rejected": [no, more[0]]},
        "not match the prompt of the row": {**rows["bare"], "chosen": [{"role": "tool", "content": "2"}]},
        "the answer of line 1 of .* is missing": {**rows["whole"], "chosen": [system, asked]},
        "rejected of line 1 of .* has an answer of weight 0": {**rows["bare"], "rejected": [{**no, "weight": 0}]},
    }.items():
        write(file, [row])
        run = compose_one([*runs.settings, f"data.path={file}"])
        assert re.search(told, "\n".join(map(str, run.data.check(run)))), told


def test_loss_covers_all_answers_of_each_side(runs):
    """Check that messages between answers do not count, and compare log-likelihoods with transformers."""
    asked, sure = ({"role": "user", "content": text} for text in ("1+1?", "sure?"))
    yes, no, oh = ({"role": "assistant", "content": text} for text in ("2", "3", "Oh, it is 2."))
    rows = [
        {"prompt": [asked], "chosen": [no, sure, oh], "rejected": [no, sure, no, sure, no]},
        {"chosen": [asked, yes], "rejected": [asked, no, sure, oh]},
    ]
    file = write(runs.directory / "several.jsonl", rows)
    more = (f"data.path={file}", "data.validation_fraction=0", "batch.sequence_length=320")
    of = source(runs, *more)
    said = [[of.codec.decode_special(side.tokens[side.loss_mask].tolist()) for side in pair] for pair in of.pairs]
    end = "<|im_end|>"
    assert said == [[f"3{end}Oh, it is 2.{end}", f"3{end}3{end}3{end}"], [f"2{end}", f"3{end}Oh, it is 2.{end}"]]
    runs.train("run.dir=several", *more, "validate.every=null", "run.steps=2")
    (kept,) = (runs.directory / "several").glob("first-model-*.npy")
    wanted = log_likelihoods(opened(runs.directory / "base"), of)
    assert torch.from_numpy(numpy.load(kept)) == pytest.approx(wanted, rel=1e-5)
    losses = [record["loss"] for record in runs.read_records("several")]
    assert losses[0] == pytest.approx(torch.tensor(2.0).log().item(), rel=1e-5), "both see the same targets"
    assert losses[1] < losses[0]


def test_shared_prefix_of_chats_becomes_prompt(runs):
    chat = [{"role": "user", "content": "1+1?"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("2", "3")]
    rows = [
        {"chosen": chat + answers[0], "rejected": chat + answers[1]},
        {"prompt": chat, "chosen": answers[0], "rejected": answers[1]},
    ]
    file = write(runs.directory / "other.jsonl", rows)
    one, two = source(runs, f"data.path={file}", "data.validation_fraction=0").pairs
    for ours, theirs in zip(one, two, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.loss_mask.tolist() == theirs.loss_mask.tolist()


def test_signal_stops_reference_model_scoring(runs, monkeypatch, capsys):
    """Check that scoring stops between portions and prints its progress."""
    from types import SimpleNamespace

    import gangline.train.reference_model as asking

    of = source(runs)
    of.rows = of.rows * 8
    portions: list[int] = []

    def scored(runtime, samples, device, each):
        portions.append(len(samples))
        return numpy.zeros((len(samples), each))

    monkeypatch.setattr(asking, "score_samples", scored)
    monkeypatch.setattr(asking, "list_sources", lambda s: {"train": of})
    monkeypatch.setattr(asking, "SECONDS", 0.0)
    monkeypatch.setattr(asking, "stop_requested", lambda: "SIGTERM" if len(portions) == 2 else None)
    comms = SimpleNamespace(rank=0, world=SimpleNamespace(size=1))
    session = SimpleNamespace(
        runtime=None,
        device=None,
        step=0,
        comms=comms,
        directory=SimpleNamespace(path=runs.directory, read_provenance=dict),
    )
    assert asking.introduce(session) == "SIGTERM"
    assert portions == [64, 64], "one pass for each pair"
    assert "the reference model has scored 128 of 256 pairs" in capsys.readouterr().out
    assert of.first is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dpo_gain_within_rounding_is_not_a_win(dtype):
    first = torch.full((3, 2), -120.0, dtype=dtype)
    gained = torch.tensor([torch.finfo(dtype).eps * 100, 0.1, -0.1], dtype=dtype)
    now = first + torch.stack((gained, torch.zeros_like(gained)), 1)
    _, margin = compute_dpo_losses(now, first, BETA)
    assert float(margin[0]) > 0
    assert mark_won_pairs(now, margin, BETA).tolist() == [False, True, False]
