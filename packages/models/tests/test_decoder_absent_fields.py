"""Absent or null fields of config.json for the decoder: the default of transformers, or a refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoConfig

from gangline.errors import UserError
from gangline_models.families.decoder import DecoderFormat
from gangline_models.hugging_face.config import read_model_config

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "rope_theta": 3e4,
}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 5.0, "original_max_position_embeddings": 16}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0, "layer_types": None}
FILES: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "llama3": SIZES
    | {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "llama3", **LLAMA3}, "hidden_act": "silu"},
    "mistral": SIZES | {"architectures": ["MistralForCausalLM"], "sliding_window": 7},
    "qwen3": SIZES | {"architectures": ["Qwen3ForCausalLM"], **WINDOWS},
}
TYPES = {"llama": "llama", "llama3": "llama", "mistral": "mistral", "qwen3": "qwen3"}


def without(content: dict[str, Any]):
    """Yield (field, file without the field, with null, or with a part of the field)."""
    for name in content.keys() - {"architectures"}:
        rest = {key: value for key, value in content.items() if key != name}
        yield name, rest
        yield name, rest | {name: None}
        for key in content[name] if isinstance(content[name], dict) else ():
            inner = {other: value for other, value in content[name].items() if other != key}
            yield key, rest | {name: inner}
            yield key, rest | {name: inner | {key: None}}


def computed(directory, content: dict[str, Any]) -> dict[str, Any]:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(content))
    return DecoderFormat().describe(read_model_config(directory))


@pytest.mark.parametrize("name", FILES)
def test_absent_fields_match_transformers_defaults(name, tmp_path):
    wrong = {}
    for field, content in without(FILES[name]):
        try:
            found = computed(tmp_path / "short", content)
        except UserError as error:
            if field not in str(error):
                wrong[field] = str(error)
            continue
        try:
            full = AutoConfig.for_model(TYPES[name], **content).to_dict()
        except Exception:  # transformers refuses the file
            continue
        expected = computed(tmp_path / "full", full | {"architectures": content["architectures"]})
        if found != expected:
            wrong[field] = {key: (found[key], expected[key]) for key in found if found[key] != expected[key]}
    assert wrong == {}


@pytest.mark.parametrize("place", ["rope_parameters", ""])
@pytest.mark.parametrize("name", FILES)
def test_partial_rotary_factor_is_refused(name, place, tmp_path):
    more = {"partial_rotary_factor": 0.5}
    content = FILES[name] | (
        {place: {**LLAMA3, "rope_type": "llama3", **more}, "rope_scaling": None} if place else more
    )
    with pytest.raises(UserError, match="partial_rotary_factor"):
        computed(tmp_path, content)
