"""Reinforcement learning with TRL: TRL trains the exported model, and a run starts from the result."""

from __future__ import annotations

import shlex

import pytest
import torch
from chats import chats, tokenizer
from small_models import llama, logits, opened

from gangline.cli.main import main
from gangline_testkit import RealRuns

SETTINGS = (
    "batch.global_size=4",
    "batch.sequence_length=64",
    "run.steps=2",
    "run.sample=0",
    "track=[jsonl]",
    "track.jsonl.figure=false",
)
SETTINGS += ("precision=fp32", "data=chat", "optimizer.learning_rate=0.01", "schedule=constant", "validate.every=null")


def reward(completions, **_) -> list[float]:
    """Return a higher reward for letters late in the alphabet, so that two texts rarely have the same reward."""
    return [sum(map(ord, text)) / 1000 for text in completions]


@pytest.mark.nightly
def test_export_trained_with_trl_grpo_is_imported(tmp_path, capsys):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    base = llama(tmp_path / "base")
    path, file = tokenizer(tmp_path / "base"), chats(tmp_path / "chats.jsonl")
    with RealRuns(tmp_path, SETTINGS) as runs:
        runs.settings = (*SETTINGS, *base, f"data.tokenizer={path}", f"data.path={file}")
        runs.train("run.dir=chats", "lora=on")
        assert main(["export", str(tmp_path / "chats"), str(tmp_path / "policy"), "--merge"]) == 0
        torch.manual_seed(0)
        args = GRPOConfig(
            output_dir=str(tmp_path / "trl"),
            max_steps=3,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            learning_rate=1e-2,
            temperature=3.0,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        prompts = Dataset.from_list([{"prompt": f"{n}+{n}?"} for n in range(8)])
        # Pass only the path: TRL finds weights, tokenizer and generation config in the directory.
        trainer = GRPOTrainer(str(tmp_path / "policy"), reward, args=args, train_dataset=prompts)
        trainer.train()
        assert trainer.state.global_step == 3
        trainer.save_model(str(tmp_path / "trained"))
        before, after = (logits(opened(tmp_path / name)) for name in ("policy", "trained"))
        assert not torch.allclose(before, after, atol=1e-3), "training changed nothing"
        capsys.readouterr()
        assert main(["import", str(tmp_path / "trained")]) == 0
        words = shlex.split(capsys.readouterr().out.replace("\\\n", " "))
        assert words[0] == "train"
        runs.settings = (*SETTINGS, *words[1:], f"data.path={file}")
        runs.train("run.dir=on", "optimizer.learning_rate=0", "run.steps=1")
    assert main(["export", str(tmp_path / "on"), str(tmp_path / "back")]) == 0
    torch.testing.assert_close(logits(opened(tmp_path / "back")), after, rtol=1e-5, atol=1e-5)
