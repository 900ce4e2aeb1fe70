"""Hugging Face files of models with experts: same logits as transformers, round trip, refused options."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Dots1Config,
    Dots1ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gangline.errors import UserError
from gangline.model.build import construct, materialise
from gangline.model.compose import compose_model
from gangline.model.init import list_shards
from gangline_models.hugging_face.commands import list_overrides
from gangline_models.hugging_face.config import make_run_config_json, read_edited_config
from gangline_models.hugging_face.names import find_hf_tensors
from gangline_models.hugging_face.read import load_pretrained
from gangline_models.hugging_face.write import export
from gangline_moe.config import MoeOptions
from gangline_moe.interop.format import MoeFormat
from gangline_moe.interop.read import read_experts
from gangline_moe.presets import DeepSeekV3, Mixtral8x7B, Qwen3_30B_A3B
from gangline_moe.routers.config import Biased, ExpertChoice, Grouped, Sigmoid, Softmax
from gangline_testkit.inputs import make_full_batch
from gangline_testkit.runs import build_small_run
from gangline_testkit.sessions import open_session

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
MIXTRAL = MixtralConfig(**COMMON, intermediate_size=48, num_local_experts=4, sliding_window=None)
QWEN = Qwen3MoeConfig(
    **COMMON,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_experts=8,
    norm_topk_prob=False,
    mlp_only_layers=[0],
)
DOTS = Dots1Config(
    **COMMON,
    intermediate_size=48,
    moe_intermediate_size=24,
    n_routed_experts=8,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.7,
    norm_topk_prob=True,
    sliding_window=None,
)
CASES = {
    "mixtral": (MixtralForCausalLM, MIXTRAL),
    "qwen3-moe": (Qwen3MoeForCausalLM, QWEN),
    "dots.llm1": (Dots1ForCausalLM, DOTS),
}


def words(directory):
    """Return the run that `gangline import` would print."""
    from gangline_models.hugging_face.commands import _list_part_overrides, _list_settings

    config, edits = read_edited_config(directory)
    found = [word for edit in edits for word in _list_part_overrides(edit)]
    return build_small_run("model.qk_norm=false", *_list_settings(config, "model"), *found)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case, tmp_path):
    cls, config = CASES[case]
    torch.manual_seed(0)
    theirs = cls(config).eval()
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    theirs.save_pretrained(tmp_path / "hf")
    run = words(tmp_path / "hf")
    assert not run.model.check(run)
    assert not run.edits["moe"].check(run)
    tree, plan = compose_model(run)
    ours = materialise(construct(tree), plan).eval()
    load_pretrained(tmp_path / "hf", list_shards(ours, plan), plan)
    tokens = torch.randint(0, 97, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, want = ours.compute_logits(make_full_batch(tokens)), theirs(tokens).logits
    assert want.std() > 0.3
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))

    shapes = {s.name.removeprefix("model/"): tuple(s.global_shape) for s in list_shards(ours, plan)}
    shapes = {name: shape for name, shape in shapes.items() if find_hf_tensors(plan, name, shape)}
    written = make_run_config_json(run, "run", "float32")
    export(tmp_path / "out", ((n, ours.state_dict()[n]) for n in shapes), plan=plan, shapes=shapes, config=written)
    again = cls.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, want)


def test_weights_of_surplus_expert_are_refused(tmp_path):
    """Check that import and train refuse with the same message."""
    torch.manual_seed(0)
    MixtralForCausalLM(MIXTRAL).save_pretrained(tmp_path / "hf")
    words, path = list_overrides(tmp_path / "hf"), tmp_path / "hf" / "model.safetensors"
    extra = "model.layers.0.block_sparse_moe.experts.4.w1.weight"
    save_file(load_file(path) | {extra: torch.ones(48, 32)}, path, {"format": "pt"})
    with pytest.raises(UserError) as refused:
        list_overrides(tmp_path / "hf")
    assert f"match no parameter of this model.\n  {extra}." in str(refused.value)
    with pytest.raises(UserError) as again:
        open_session(tmp_path / "run", *words)
    assert str(again.value) == str(refused.value)


PLAIN = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6, "intermediate_size": 64}
NORMED = {**PLAIN, "architectures": ["Qwen3ForCausalLM"]}


@pytest.mark.parametrize(
    ("options", "config"),
    [
        (MoeOptions(ffn_dim=32), PLAIN),
        (Mixtral8x7B(), PLAIN),
        (Qwen3_30B_A3B(), NORMED),
        (MoeOptions(ffn_dim=32, first=1, every=2), NORMED),
        (MoeOptions(ffn_dim=32, first=5), NORMED),
        (DeepSeekV3(router=Grouped()), NORMED),
        (MoeOptions(ffn_dim=32, shared=2, router=Sigmoid(scale=2.0, renormalise=False)), NORMED),
    ],
)
def test_moe_options_round_trip_through_config(options, config):
    written = json.loads(json.dumps(MoeFormat().write(options, config)))
    back, rest = read_experts(type(options), written)
    kept = ("experts", "top_k", "ffn_dim", "first", "shared")
    assert {name: getattr(back, name) for name in kept} == {name: getattr(options, name) for name in kept}
    assert back.every == options.every
    assert type(back.router) is type(options.router)
    assert rest["architectures"] == config["architectures"]


@pytest.mark.parametrize(
    ("options", "config"),
    [
        (MoeOptions(router=ExpertChoice()), PLAIN),
        (MoeOptions(first=1), PLAIN),
        (MoeOptions(capacity_factor=1.0), NORMED),
        (MoeOptions(router=Softmax(bias_rate=0.1)), NORMED),
        (MoeOptions(router=Sigmoid()), NORMED),
        (MoeOptions(shared=1, router=Sigmoid(), every=2), NORMED),
        (MoeOptions(shared=1, router=Sigmoid(), capacity_factor=1.0), NORMED),
        (MoeOptions(router=Softmax()), NORMED | {"use_sliding_window": True}),
        (MoeOptions(router=Softmax()), PLAIN | {"architectures": ["MistralForCausalLM"], "sliding_window": 8}),
    ],
)
def test_moe_options_without_hugging_face_equivalent_refuse_export(options, config):
    try:
        written = MoeFormat().write(options, config)
    except UserError:
        written = None
    assert written is None


@pytest.mark.parametrize(
    "dense", ["LlamaForCausalLM", "GptOssForCausalLM", "Qwen3NextForCausalLM", "DeepseekV3ForCausalLM"]
)
@pytest.mark.parametrize(
    "options",
    [
        MoeOptions(router=Sigmoid(bias_rate=0.0), shared=1, capacity_factor=1.0),
        MoeOptions(router=Biased(renormalise=False), shared=1, shared_gate=True, first=1, every=2),
        MoeOptions(router=Softmax(bias_rate=0.1), shared=2),
    ],
)
def test_export_refusal_lists_options_to_set(options, dense):
    """Check that export accepts the run after the listed options are set."""
    config = PLAIN | {"architectures": [dense]}
    with pytest.raises(UserError, match=f"Hugging Face has no {dense} with the experts of this run") as refused:
        MoeFormat().write(options, config)
    hint = "Hugging Face has this architecture with experts only for runs with  "
    words = refused.value.details[0].removeprefix(hint).split()
    assert words
    for word in words:
        name, _, text = word.partition("=")
        value = {"biased": Biased, "sigmoid": Sigmoid, "softmax": Softmax}.get(text) or json.loads(text)
        if name == "moe/router":
            options = replace(options, router=value())
        elif name.startswith("moe.router."):
            options = replace(options, router=replace(options.router, **{name.removeprefix("moe.router."): value}))
        else:
            options = replace(options, **{name.removeprefix("moe."): value})
    assert MoeFormat().write(options, config)["architectures"]


def test_unsupported_moe_config_is_refused():
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 6, "num_experts": 8}
    config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
    with pytest.raises(UserError, match="not evenly spaced"):
        read_experts(MoeOptions, config | {"mlp_only_layers": [1]})
    with pytest.raises(UserError, match="sliding_window=4096"):
        read_experts(MoeOptions, config | {"sliding_window": 4096})
    assert read_experts(MoeOptions, {"architectures": ["LlamaForCausalLM"]}) is None


SIZES = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, MixtralConfig),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, Qwen3MoeConfig),
        (
            {"architectures": ["Dots1ForCausalLM"], "sliding_window": None}
            | {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
            Dots1Config,
        ),
    ],
    ids=["mixtral", "qwen3-moe", "dots.llm1"],
)
def test_absent_moe_fields_match_transformers_defaults(config, theirs):
    short, _ = read_experts(MoeOptions, config | SIZES)
    full, _ = read_experts(MoeOptions, theirs(**config, **SIZES).to_dict() | config)
    assert short == full


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts=0"),
        ("mixtral", {"intermediate_size": "48"}, 'intermediate_size="48"'),
        ("qwen3-moe", {"num_experts_per_tok": None}, "num_experts_per_tok=null"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("qwen3-moe", {"mlp_only_layers": "0"}, "mlp_only_layers="),
        ("dots.llm1", {"n_group": 3}, "n_group=3"),
        ("dots.llm1", {"topk_group": 5}, "topk_group=5"),
        ("dots.llm1", {"num_local_experts": None, "n_routed_experts": None}, "n_routed_experts=null"),
    ],
)
def test_invalid_moe_config_field_is_refused(name, changes, words):
    config = CASES[name][1].to_dict() | {"architectures": [CASES[name][0].__name__]} | changes
    with pytest.raises(UserError) as refused:
        read_experts(MoeOptions, config)
    assert words in str(refused.value)


def test_missing_field_without_a_default_is_named():
    with pytest.raises(UserError, match="does not give num_experts_per_tok"):
        read_experts(MoeOptions, {"architectures": ["Dots1ForCausalLM"], "sliding_window": None})


def test_weights_with_different_moe_options_are_refused(tmp_path):
    MixtralForCausalLM(MIXTRAL).save_pretrained(tmp_path)
    run = words(tmp_path)

    def told(**changes):
        options = replace(run.edits["moe"], **changes)
        changed = replace(run, edits={"moe": options})
        return [str(problem.what + " " + problem.why) for problem in options.check(changed)]

    assert told() == []
    assert any("moe.experts is 4 in the directory and 8 in this run" in text for text in told(experts=8))
    assert any(
        "moe.router is Softmax in the directory and Sigmoid in this run" in text for text in told(router=Sigmoid())
    )
    assert any("moe.ffn_dim is 48 in the directory and 24 in this run" in text for text in told(ffn_dim=None))
