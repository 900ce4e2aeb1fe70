"""Converter between options of the part `decoder` and config.json of Llama, Mistral and Qwen3. Torch-free."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from gangline.config.fields import resolve_hints_with_ranges
from gangline.errors import UserError
from gangline_basics.model.config import DecoderConfig
from gangline_models.families.decoder_rope import ROPE_FIELDS, SCALING, read_rope
from gangline_models.families.decoder_window import WINDOW_FIELDS, make_window_json, read_window
from gangline_models.hugging_face.contract import ModelFormat
from gangline_models.hugging_face.fields import check_value, refuse_unknown

# architecture -> whether queries and keys are normalised (QK norm)
ARCHITECTURES = {"LlamaForCausalLM": False, "MistralForCausalLM": False, "Qwen3ForCausalLM": True}
MODEL_TYPES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen3ForCausalLM": "qwen3"}

# option -> field of config.json with an equal value
SAME = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
NEEDED = ("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim")
# Fields of features that the decoder does not support -> the only accepted value.
ABSENT = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
# All supported fields. Any other field is refused by name, unless it is harmless.
KNOWN = frozenset((*SAME.values(), *ABSENT, *ROPE_FIELDS, *WINDOW_FIELDS))


class DecoderFormat(ModelFormat):
    """Converter between the options of the part `decoder` of gangline-basics and config.json."""

    architectures = tuple(ARCHITECTURES)

    def read(self, directory: str | Path, config: dict[str, Any]) -> DecoderConfig:
        return read_decoder_config(directory, config)

    def write(self, options: DecoderConfig, dtype: str, max_position: int) -> dict[str, Any]:
        return make_config_json(options, dtype=dtype, max_position=max_position)

    def describe(self, options: DecoderConfig) -> dict[str, Any]:
        values = {item.name: getattr(options, item.name) for item in fields(DecoderConfig)}
        values |= {"kv_heads": options.key_heads, "head_dim": options.head_width}
        silent = {"init_std", "weights", "z_loss", "attention_backend"}
        if options.rope_scaling_factor is None:
            silent |= {"rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_position"}
        return {name: value for name, value in values.items() if name not in silent}


def read_decoder_config(directory: str | Path, hf_config: dict[str, Any]) -> DecoderConfig:
    """Return the options that describe a config.json with one of `ARCHITECTURES`.

    Reads the fields of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters). Raises UserError for
    unsupported features.
    """
    architecture, holder, ranges = (
        hf_config["architectures"][0],
        f"{directory} holds a model",
        resolve_hints_with_ranges(DecoderConfig),
    )
    for key, value in ABSENT.items():
        if hf_config.get(key, value) != value:
            raise UserError(
                f"{directory} holds a model with unsupported {key}={hf_config[key]}.",
                f"gangline's decoder supports only {key}={value}.",
            )
    options = {
        option: check_value(key, hf_config[key], ranges[option], holder)
        for option, key in SAME.items()
        if hf_config.get(key) is not None
    }
    missing = [SAME[name] for name in NEEDED if name not in options]
    if missing:
        raise UserError(f"{directory}/config.json lacks {', '.join(missing)}.")
    options.setdefault("norm_eps", 1e-6)  # default of transformers
    refuse_unknown(directory, hf_config, KNOWN)
    if ARCHITECTURES[architecture]:
        options.setdefault("head_dim", 128)  # default of Qwen3; other architectures: hidden_size / heads
    return DecoderConfig(
        **options,
        **read_rope(directory, hf_config, ranges),
        **read_window(directory, hf_config, options["layers"]),
        qk_norm=ARCHITECTURES[architecture],
        weights=str(directory),
    )


def choose_architecture(config: DecoderConfig) -> str:
    """Return the Hugging Face architecture of this model. Raises UserError if no architecture supports its options."""
    other = {"attention_scale": config.attention_scale, "soft_cap": config.soft_cap, "sinks": config.sinks or None}
    if extras := [f"model.{name}" for name, value in other.items() if value is not None]:
        raise UserError(
            f"the model cannot be exported: no Hugging Face architecture supports {', '.join(extras)}.",
            f"{', '.join(ARCHITECTURES)} would ignore these options and compute different outputs.",
        )
    if config.qk_norm:
        return "Qwen3ForCausalLM"
    return "LlamaForCausalLM" if config.window is None else "MistralForCausalLM"


def make_config_json(config: DecoderConfig, *, dtype: str = "float32", max_position: int = 2048) -> dict[str, Any]:
    """Return the config.json, with fields that both transformers 4 and 5 read.

    max_position: context length in training; ignored with RoPE scaling, whose options give the context length. Raises
    UserError for features that no architecture supports. The z-loss is left out, since it matters only in training.
    """
    architecture = choose_architecture(config)
    values = {key: getattr(config, option) for option, key in SAME.items()}
    scaling = None
    if config.rope_scaling_factor is not None:
        scaling = {"rope_type": "llama3", **{key: getattr(config, option) for option, key in SCALING.items()}}
        max_position = round(config.rope_original_max_position * config.rope_scaling_factor)
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        **values,
        "num_key_value_heads": config.key_heads,
        "head_dim": config.head_width,
        **ABSENT,
        **make_window_json(config, architecture),
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "max_position_embeddings": max_position,
        "torch_dtype": dtype,
    }
