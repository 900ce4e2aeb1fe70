"""Each family computes what transformers computes, and its weights and its config.json go there and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_cases import CASES, LENGTH, theirs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gangline import UserError
from gangline.config import BatchSection, Run, default_run
from gangline.interop import export, load_pretrained, model_config_from
from gangline.model import compose_model, construct, parameter_shapes, shards_of
from gangline.model.build import materialise
from gangline.strategy import Batch
from gangline.testing.inputs import whole_sequences


def run_of(directory: Path) -> Run:
    batch = BatchSection(sequence_length=LENGTH, global_size=2)
    return default_run(model=model_config_from(directory), batch=batch)


def ours(run: Run, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The run's model with the weights that it starts from."""
    tree, plan = compose_model(run)
    model = materialise(construct(tree), plan, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    load_pretrained(run.model.pretrained(), shards_of(model, plan), plan)
    return model


def write(run: Run, model: torch.nn.Module, directory: Path, dtype: str = "float32") -> Path:
    tree, plan = compose_model(run)
    config = run.model.to_hugging_face(dtype, LENGTH)
    arrays = ((name, p.detach()) for name, p in model.named_parameters())
    export(directory, arrays, plan=plan, shapes=parameter_shapes(tree), config=config, dtype=dtype)
    return directory


def tokens(vocab_size: int) -> Batch:
    generator = torch.Generator().manual_seed(5)
    return whole_sequences(torch.randint(vocab_size, (2, LENGTH), generator=generator))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> their model, and the directory that it was saved in."""
    made: dict[str, tuple] = {}

    def save(name: str):
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            model = theirs(name)
            model.save_pretrained(directory)
            made[name] = model, directory
        return made[name]

    return save


@pytest.mark.parametrize("name", CASES)
def test_logits_are_theirs(name, saved):
    model, directory = saved(name)
    run = run_of(directory)
    assert run.model.check(run) == []
    batch = tokens(model.config.vocab_size)
    with torch.no_grad():
        expected, logits = model(batch.tokens).logits, ours(run).logits(batch)
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_there_and_back_is_bit_exact_and_transformers_opens_it(name, saved, tmp_path):
    model, directory = saved(name)
    run = run_of(directory)
    out = write(run, ours(run), tmp_path / "out")
    before, after = load_file(directory / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    again = run_of(out).model
    assert again.computed() == run.model.computed()
    batch = tokens(model.config.vocab_size)
    opened, first = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        for path in (out, directory)
    )
    assert type(opened) is type(model)
    with torch.no_grad():
        assert torch.equal(opened(batch.tokens).logits, first(batch.tokens).logits)


@pytest.mark.parametrize("name", CASES)
def test_an_unknown_field_is_refused_by_name(name, saved, tmp_path):
    _, directory = saved(name)
    content = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"sandwich_multiplier": 2.0}))
    with pytest.raises(UserError, match=r"sandwich_multiplier=2\.0"):
        model_config_from(tmp_path)
