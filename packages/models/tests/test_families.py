"""Each family computes what transformers computes, and its weights and its config.json go there and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_cases import CASES, LENGTH, theirs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gangline import UserError
from gangline.config import BatchSection, Run, default_run
from gangline.interop import export, load_pretrained, model_config_from
from gangline.model import compose_model, construct, parameter_shapes, shards_of
from gangline.model.build import materialise
from gangline.strategy import Batch
from gangline.testing.inputs import whole_sequences
from gangline_models.families.gpt2 import Gpt2
from gangline_models.families.phi3 import Phi3
from gangline_models.families.qwen2 import Qwen2
from gangline_models.presets import PRESETS
from gangline_models.rope.llama3 import Llama3Rope
from gangline_models.rope.longrope import LongRope
from gangline_models.rope.yarn import YarnRope


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


def test_the_first_files_of_gpt2_have_no_prefix_and_hold_masks(saved, tmp_path):
    model, directory = saved("gpt2")
    tensors = load_file(directory / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    run, batch = run_of(tmp_path), tokens(97)
    with torch.no_grad():
        assert (ours(run).logits(batch) - model(batch.tokens).logits).abs().max() < 1e-5


def said(run: Run) -> str:
    return "\n".join(map(str, [*run.model.check(run), *getattr(run.model, "rope", run.model).check(run)]))


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Gpt2(positions=LENGTH - 1), f"batch.sequence_length={LENGTH} is more than model.positions={LENGTH - 1}"),
        (Qwen2(dim=50, heads=4), "model.dim=50 does not divide into model.heads=4"),
        (Qwen2(heads=12, kv_heads=5), "model.kv_heads=5 does not divide model.heads=12"),
        (Phi3(head_dim=10, rotary_share=0.5), "of each head 5 features are rotated"),
        (Phi3(head_dim=8, rope=LongRope(short_factor=[1.0], long_factor=[1.0] * 4)), "short_factor has 1 factors"),
        (Qwen2(rope=Llama3Rope(low_freq_factor=4.0)), "model.rope.high_freq_factor=4.0 is not more than"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(model, what):
    run = default_run(model=model, batch=BatchSection(sequence_length=LENGTH, global_size=2))
    assert what in said(run)


def test_what_a_family_has_no_words_for_is_not_written():
    with pytest.raises(UserError, match="type yarn has no Hugging Face architecture"):
        Phi3(rope=YarnRope()).to_hugging_face("float32", 64)


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("qwen2", {"use_mrope": True}, "use_mrope=True"),
        ("qwen2", {"hidden_act": "relu"}, "hidden_act=relu"),
        ("qwen2", {"rope_parameters": {"rope_type": "spiral"}}, "rope_type=spiral"),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "skew": 3}}, "skew"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types="),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1, 0]}, "no_rope_layers="),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("olmo2", {"hidden_size": None}, "does not give hidden_size"),
    ],
)
def test_what_a_family_cannot_compute_is_refused(name, change, what, saved, tmp_path):
    content = json.loads((saved(name)[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(UserError) as refused:
        model_config_from(tmp_path)
    assert what in str(refused.value)


@pytest.mark.parametrize("name", PRESETS)
def test_a_published_shape_is_a_model(name):
    config = PRESETS[name]()
    run = default_run(model=config)
    assert config.check(run) == []
    tree, plan = compose_model(run)
    assert plan.unmatched(parameter_shapes(tree)) == []
    assert config.to_hugging_face("bfloat16", 4096)["hidden_size" if config.model_type != "gpt2" else "n_embd"]
