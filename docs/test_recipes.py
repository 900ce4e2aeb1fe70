"""Recipes of published models: each can be composed and planned, and docs/recipes.md has their current predictions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import recipes
import torch

from gangline.config.compose import compose_one
from gangline_basics.cluster.file import load_cluster
from gangline_planner.assumed import check_run

PATHS = [path for family in recipes.FAMILIES for path in recipes.list_recipes(family)]
SMALL = (
    *("batch.global_size=2", "batch.micro_size=null", "batch.sequence_length=64", "run.steps=2", "run.sample=0"),
    *("schedule.warmup_steps=0", "validate.every=null", "run.device=cpu", "run.dir=run"),
)


def test_every_recipe_belongs_to_one_family():
    assert sorted(PATHS) == sorted(recipes.FOLDER.glob("*gpu.yaml"))
    assert f"one of {len(PATHS)} [recipes]" in (recipes.PAGE.parent.parent / "README.md").read_text()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_recipe_is_valid_and_short(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) <= 20
    run = compose_one([f"recipe={path}"])
    assert check_run(run) is None
    assert f"| `{path.stem}` |" in recipes.PAGE.read_text()


@pytest.mark.parametrize("family", recipes.FAMILIES)
def test_row_matches_current_plan(family):
    path = recipes.list_recipes(family)[-1]
    row = recipes.format_row(path, load_cluster(recipes.CLUSTER))
    assert row in recipes.PAGE.read_text().splitlines(), "python docs/recipes.py"


@pytest.mark.nightly
def test_page_is_current():
    assert recipes.PAGE.read_text() == recipes.write_page(), "python docs/recipes.py"


def run(command, *words):
    """Run a command of gangline; it must succeed."""
    module = "gangline.cli.train" if command == "train" else "gangline.cli.main"
    call = [sys.executable, "-c", f"import sys; from {module} import main; sys.exit(main(sys.argv[1:]))", *words]
    done = subprocess.run(call, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr


def read_losses():
    lines = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def weights(here):
    """Directory of Qwen3 0.6B with random weights, a byte tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, rope_theta=1e6, max_position_embeddings=40960,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained("weights")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save("weights/tokenizer.json")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    settings = {"chat_template": template, "eos_token": "<|end|>"}
    Path("weights/tokenizer_config.json").write_text(json.dumps(settings))
    return "model.weights=weights"


def write_rows(name, make):
    Path(name).write_text("".join(json.dumps(make(number)) + "\n" for number in range(20)))
    return f"data.path={name}"


@pytest.mark.nightly
def test_pretraining_recipe_trains_on_cpu(here):
    Path("text").mkdir()
    for number in range(20):
        Path(f"text/{number}.txt").write_text(f"Page {number}. It was the best of times. " * 20)
    run("gangline", "data", "prepare", "text", "--out", "store")
    run("train", "recipe=gpt2-124m-pretrain-1gpu", "data.path=store", *SMALL)
    first, last = read_losses()
    assert last < first
    assert 10 < first < 12  # log 50257 = 10.8: initial weights


@pytest.mark.nightly
def test_lora_recipe_trains_on_cpu(here, weights):
    row = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2."}]}
    run("train", "recipe=qwen3-0.6b-lora-1gpu", weights, write_rows("chats.jsonl", lambda number: row), *SMALL)
    first, last = read_losses()
    assert last < first


@pytest.mark.nightly
def test_dpo_recipe_trains_on_cpu(here, weights):
    path = write_rows("pairs.jsonl", lambda n: {"prompt": f"{n}?", "chosen": f"{n}.", "rejected": f"{n + 1}!"})
    run("train", "recipe=qwen3-0.6b-dpo-1gpu", weights, path, *SMALL)
    first, _ = read_losses()
    assert abs(first - 0.6931) < 1e-3  # log 2: the reference model is the initial model
