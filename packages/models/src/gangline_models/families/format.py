"""Base classes of the converters between options of model families and config.json. Torch-free."""

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from gangline import UserError
from gangline.config.fields import resolve_hints_with_ranges
from gangline_models.families.base import FamilyConfig, PatternConfig, RotaryConfig, TwoRopesConfig
from gangline_models.hugging_face.config_reader import ConfigReader
from gangline_models.hugging_face.contract import ModelFormat
from gangline_models.hugging_face.layers import list_layer_types
from gangline_models.hugging_face.rope import read_rope

TRAINING = {"weights", "init_std", "z_loss", "attention_backend"}  # options without a field in config.json
SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
Family = TypeVar("Family", bound=FamilyConfig)
Rotary = TypeVar("Rotary", bound=RotaryConfig)
Pattern = TypeVar("Pattern", bound=PatternConfig)
TwoRopes = TypeVar("TwoRopes", bound=TwoRopesConfig)


class FamilyFormat(ModelFormat, ABC, Generic[Family]):
    """Converter of a family's config.json, by tables; `read_more` and `write_more` handle fields that fit no table.

    same      option -> field of config.json with the same value
    absent    field -> the only value that the family supports
    silent    option -> value if a file lacks the field: the default in transformers
    nullable  options whose field may be null
    """

    options: type[Family]
    model_type: str = ""
    same: Mapping[str, str] = {}
    absent: Mapping[str, Any] = {}
    silent: Mapping[str, Any] = {}
    nullable: frozenset[str] = frozenset()

    def read(self, directory: str | Path, config: dict[str, Any]) -> Family:
        reader = ConfigReader(directory, config)
        options: dict[str, Any] = {}
        ranges = resolve_hints_with_ranges(self.options)
        for option, key in self.same.items():
            if option not in self.silent:
                options[option] = reader.require(key, ranges[option])
            else:
                read = reader.take if option in self.nullable else reader.read_given
                options[option] = read(key, self.silent[option], ranges[option])
        for name, value in self.absent.items():
            reader.expect(name, value)
        options |= self.read_more(reader, options)
        reader.finish()
        return self.options(**options, weights=str(directory))

    def read_more(self, reader: ConfigReader, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that `same` does not contain. options: the options read by `same`."""
        return {}

    def write(self, options: Family, dtype: str, max_position: int) -> dict[str, Any]:
        description = self.describe(options)
        return {
            "architectures": list(self.architectures[:1]),
            "model_type": self.model_type,
            **{key: description[option] for option, key in self.same.items()},
            **self.absent,
            "max_position_embeddings": max_position,
            **self.write_more(options, max_position),
            **_read_special_tokens(options.weights),
            "torch_dtype": dtype,
        }

    def write_more(self, options: Family, max_position: int) -> dict[str, Any]:
        """Return the fields that `read_more` reads."""
        return {}

    def describe(self, options: Family) -> dict[str, Any]:
        values = {item.name: getattr(options, item.name) for item in fields(options)}
        return {name: value for name, value in values.items() if name not in TRAINING}


def _read_special_tokens(weights: str | None) -> dict[str, Any]:
    """Return the special token ids of the directory `weights`; None without it, to override transformers' defaults."""
    there = Path(weights or ".") / "config.json"
    config = json.loads(there.read_text(encoding="utf-8")) if weights and there.is_file() else {}
    return {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


class RotaryFormat(FamilyFormat[Rotary], ABC):
    """Converter of families with rotary positions and grouped-query attention."""

    silent_theta: float = 10_000.0  # RoPE base if a file has no rope_theta
    nullable = frozenset(("kv_heads",))

    def read_more(self, reader: ConfigReader, options: Mapping[str, Any]) -> dict[str, Any]:
        return read_rope(reader, self.silent_theta)

    def write_more(self, options: Rotary, max_position: int) -> dict[str, Any]:
        return {
            "rope_parameters": {"rope_theta": options.rope_theta, **options.rope.to_json()},
            "max_position_embeddings": options.rope.compute_max_position(max_position),
        }

    def describe(self, options: Rotary) -> dict[str, Any]:
        return {**super().describe(options), "kv_heads": options.key_heads, "head_dim": options.head_width}


class PatternFormat(RotaryFormat[Pattern], ABC):
    """Converter of families with a sliding window in some blocks."""

    def write_more(self, options: Pattern, max_position: int) -> dict[str, Any]:
        window_fields = {"sliding_window": options.window, "layer_types": list_layer_types(options.windows)}
        return super().write_more(options, max_position) | window_fields


class TwoRopesFormat(PatternFormat[TwoRopes], ABC):
    """Converter of families with a separate RoPE base in blocks with a sliding window."""

    def write_more(self, options: TwoRopes, max_position: int) -> dict[str, Any]:
        config_fields = super().write_more(options, max_position)
        if config_fields["rope_parameters"].get("truncate", True) is not True:
            raise UserError(
                "the model cannot be exported: model.rope.truncate=false requires layers of one type.",
                "With two types of layers transformers ignores truncate and would compute different outputs.",
            )
        local = {"rope_type": "default", "rope_theta": options.local_rope_theta}
        return config_fields | {
            "rope_parameters": {"full_attention": config_fields["rope_parameters"], "sliding_attention": local}
        }
