"""Model families and RoPE scaling: logits of transformers, round trip of weights and config.json, refused
configurations (the cases are in family_cases.py).
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from family_cases import CASES, LENGTH
from family_files import compare_logits, ours, run_of, tokens
from family_suite import FamilySuite
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from gangline import UserError
from gangline.config import BatchSection, Run
from gangline.config.defaults import build_default_run
from gangline.model.compose import compose_model
from gangline.model.tree import get_parameter_shapes
from gangline.plugin.registry import installed
from gangline_models.families.gpt2 import Gpt2, Gpt2Format
from gangline_models.families.olmo import Olmo3, Olmo3Format
from gangline_models.families.phi3 import Phi3, Phi3Format
from gangline_models.families.qwen2 import Qwen2
from gangline_models.hugging_face.commands import list_overrides
from gangline_models.hugging_face.config import make_run_config_json, read_model_config
from gangline_models.presets import PRESETS
from gangline_models.rope.llama3 import Llama3Rope
from gangline_models.rope.longrope import LongRope
from gangline_models.rope.yarn import YarnRope


class TestFamilies(FamilySuite):
    cases = tuple(CASES)

    def test_gpt2_weights_without_prefix_and_with_masks_load(self, saved, tmp_path):
        model, directory = saved("gpt2")
        tensors = load_file(directory / "model.safetensors")
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
        save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_text((directory / "config.json").read_text())
        run, batch = run_of(tmp_path), tokens(97)
        with torch.no_grad():
            assert (ours(run).compute_logits(batch) - model(batch.tokens).logits).abs().max() < 1e-5

    @pytest.mark.parametrize("same", [True, False])
    def test_head_differing_from_tied_embedding_is_refused(self, same, saved, tmp_path):
        model, directory = saved("qwen2-tied-yarn")
        tensors = load_file(directory / "model.safetensors")
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding.clone() if same else embedding + 1
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
        if same:
            return compare_logits(model, tmp_path)
        with pytest.raises(UserError, match=r"lm_head\.weight differs"):
            ours(run_of(tmp_path))

    def test_extra_mtp_layers_are_skipped_with_notice(self, saved, tmp_path):
        model, directory = saved("deepseek-v3-dense")
        tensors = load_file(directory / "model.safetensors")
        behind = {
            name.replace("layers.2.", "layers.3."): tensor.clone()
            for name, tensor in tensors.items()
            if "layers.2." in name
        }
        behind |= {"model.layers.3.eh_proj.weight": torch.ones(24, 48), "model.layers.3.hnorm.weight": torch.ones(24)}
        save_file(tensors | behind, tmp_path / "model.safetensors", {"format": "pt"})
        content = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 0}  # else mtp=on
        (tmp_path / "config.json").write_text(json.dumps(content))
        compare_logits(model, tmp_path)
        run, whole = run_of(tmp_path), run_of(directory)
        assert "model.layers.3.*" in "".join(run.model.list_notices(run))
        assert whole.model.list_notices(whole) == []

    def test_separate_mtp_modules_are_skipped_with_notice(self, saved, tmp_path):
        model, directory = saved("qwen3-next-dense")
        tensors = load_file(directory / "model.safetensors")
        of_a_layer = {
            name.replace("model.layers.1.", "mtp.layers.0."): tensor.clone()
            for name, tensor in tensors.items()
            if "layers.1." in name
        }
        beside = of_a_layer | {f"mtp.{name}.weight": torch.ones(24) for name in ("fc", "norm", "pre_fc_norm_embedding")}
        beside["mtp.layers.0.mlp.experts.3.down_proj.weight"] = torch.ones(24, 12)
        save_file(tensors | beside, tmp_path / "model.safetensors", {"format": "pt"})
        content = json.loads((directory / "config.json").read_text()) | {"use_sliding_window": False}
        (tmp_path / "config.json").write_text(json.dumps(content))
        compare_logits(model, tmp_path)
        run, whole = run_of(tmp_path), run_of(directory)
        assert "mtp.*" in "".join(run.model.list_notices(run))
        assert whole.model.list_notices(whole) == []
        (tmp_path / "config.json").write_text(json.dumps(content | {"use_sliding_window": True}))
        with pytest.raises(UserError, match="use_sliding_window=True"):
            read_model_config(tmp_path)
        save_file(tensors | {"mtq.fc.weight": torch.ones(24)}, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match="match no parameter of this model"):
            ours(run_of(tmp_path))

    def test_attention_tensor_in_layer_without_attention_is_refused(self, saved, tmp_path):
        """Add the tensor to layer 0, which has no attention; layers with attention have a tensor of that name."""
        _, directory = saved("qwen3-next-dense")
        shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
        tensors, name = load_file(directory / "model.safetensors"), "model.layers.0.self_attn.q_norm.weight"
        assert name.replace(".0.", ".1.") in tensors
        save_file(tensors | {name: torch.ones(8)}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError) as refused:
            list_overrides(tmp_path)
        assert f"match no parameter of this model.\n  {name}." in str(refused.value)

    @pytest.mark.parametrize(
        ("name", "change", "what"),
        [
            ("qwen2", {"use_mrope": True}, "use_mrope=True"),
            ("qwen2", {"hidden_act": "relu"}, "hidden_act=relu"),
            ("qwen2", {"rope_parameters": {"rope_type": "spiral"}}, "rope_type=spiral"),
            ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "skew": 3}}, "skew"),
            (
                "phi3-partial",
                {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
                "unsupported rope_type=linear",
            ),
            ("gemma2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types="),
            ("smollm3", {"no_rope_layers": [1, 0, 1, 1, 0]}, "no_rope_layers="),
            ("gpt2", {"activation_function": "relu"}, "activation_function=gelu_new or activation_function=gelu"),
            ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
            ("olmo2", {"hidden_size": None}, "lacks hidden_size"),
            ("deepseek-v3-dense", {"head_dim": 24}, "head_dim=24"),
            (
                "gemma3",
                {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
                "Rename type to rope_type",
            ),
        ],
    )
    def test_unsupported_config_value_is_refused(self, name, change, what, saved, tmp_path):
        content = json.loads((saved(name)[1] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(content | change))
        with pytest.raises(UserError) as refused:
            read_model_config(tmp_path)
        assert what in str(refused.value)


def said(run: Run) -> str:
    return "\n".join(map(str, [*run.model.check(run), *getattr(run.model, "rope", run.model).check(run)]))


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Gpt2(positions=LENGTH - 1), f"batch.sequence_length={LENGTH} is more than model.positions={LENGTH - 1}"),
        (Qwen2(dim=50, heads=4), "model.dim=50 is not divisible by model.heads=4"),
        (Qwen2(heads=12, kv_heads=5), "model.kv_heads=5 does not divide model.heads=12"),
        (Phi3(head_dim=10, rotary_share=0.5), "RoPE would rotate 5 features per head"),
        (Phi3(head_dim=8, rope=LongRope(short_factor=[1.0], long_factor=[1.0] * 4)), "short_factor has 1 factors"),
        (Qwen2(rope=Llama3Rope(low_freq_factor=4.0)), "model.rope.high_freq_factor=4.0 must be more than"),
    ],
)
def test_inconsistent_model_sizes_are_refused(model, what):
    run = build_default_run(model=model, batch=BatchSection(sequence_length=LENGTH, global_size=2))
    assert what in said(run)


def test_export_refuses_options_without_hugging_face_fields():
    with pytest.raises(UserError, match=r"model\.rope\.truncate=false requires layers of one type"):
        Olmo3Format().write(Olmo3(rope=YarnRope(truncate=False)), "float32", 64)
    with pytest.raises(UserError, match="Phi3ForCausalLM does not support rope_type=yarn"):
        Phi3Format().write(Phi3(rope=YarnRope()), "float32", 64)
    with pytest.raises(UserError, match=r"does not support model\.biases=false"):
        Gpt2Format().write(Gpt2(biases=False), "float32", 64)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_composes_and_writes_config_json(name):
    config = PRESETS[name]()
    run = build_default_run(model=config)
    assert config.check(run) == []
    tree, plan = compose_model(run)
    assert plan.find_unmatched(get_parameter_shapes(tree)) == []
    written = make_run_config_json(run, name, "bfloat16")
    assert written["hidden_size" if written["model_type"] != "gpt2" else "n_embd"]


OURS = [name for name, offer in installed().get_offers("model").items() if offer.distribution == "gangline-models"]


@pytest.mark.parametrize("name", OURS)
def test_transformers_opens_the_config_of_every_part(name):
    """Check the types of fields: transformers does not accept 256.0 for 256."""
    config = installed().get_offers("model")[name].part.config()
    run = build_default_run(model=config, batch=BatchSection(sequence_length=LENGTH))
    content = json.loads(json.dumps(make_run_config_json(run, name, "float32")))
    theirs = type(AutoConfig.for_model(content["model_type"])).from_dict(content)
    assert theirs.hidden_size == config.dim
