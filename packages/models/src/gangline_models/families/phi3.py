"""Phi 3 (arXiv 2404.14219) and Phi 4 mini: the decoder of gangline-basics with partial RoPE. Torch-free.

In Hugging Face files one matrix has the rows of the query, key and value weights; another has those of gate and
up-projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt, Le

from gangline import UserError
from gangline.config.fields import resolve_hints_with_ranges
from gangline.plan import Plan
from gangline_basics.model.decoder_nodes import DecoderNode
from gangline_basics.model.decoder_tree import build_attention, build_block
from gangline_basics.model.names import LAYER, ModuleNames
from gangline_basics.model.plan import plan_family
from gangline_models.families.base import WindowedConfig
from gangline_models.families.format import SIZES, RotaryFormat
from gangline_models.hugging_face.rope import SHARE, read_rope, take_fields

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_models.hugging_face.config_reader import ConfigReader

KINDS = ("default", "longrope")  # supported values of rope_type


@dataclass
class Phi3(WindowedConfig):
    """Options of Phi 3: partial RoPE."""

    norm_eps: float = 1e-5
    # partial rotary factor: fraction of each head's features that RoPE rotates, counted from the first
    rotary_share: Annotated[float, Gt(0), Le(1)] = 1.0

    @property
    def rotated(self) -> int:
        return int(self.head_width * self.rotary_share)


class Phi3Format(RotaryFormat[Phi3]):
    """Converter between the options of Phi 3 and config.json."""

    options = Phi3
    architectures = ("Phi3ForCausalLM",)
    model_type = "phi3"
    same = SIZES | {"window": "sliding_window"}
    absent = {"hidden_act": "silu", "attention_bias": False}
    silent = {"tied": False, "norm_eps": 1e-5, "kv_heads": None, "window": None}
    nullable = frozenset(("kv_heads", "window"))

    def read_more(self, reader: ConfigReader, options: Mapping[str, Any]) -> dict[str, Any]:
        reader.expect("head_dim", None, options["dim"] // options["heads"])
        for name, value in (
            ("mlp_bias", False),
            ("lm_head_bias", False),
            ("full_attn_mod", 1),
            ("interpolate_factor", 1),
        ):
            reader.expect(name, value)
        share = take_fields(reader).get(SHARE, reader.read_given(SHARE, 1.0))
        reader.check(SHARE, share, resolve_hints_with_ranges(Phi3)["rotary_share"] | None)
        rope_options = read_rope(reader, self.silent_theta, original=4096, share=True)
        if share is None or rope_options["rope"].kind not in KINDS:
            what = SHARE if share is None else "rope_type"
            raise reader.explain(
                what,
                "null" if share is None else rope_options["rope"].kind,
                f"Phi 3 in transformers supports rope_type {' and '.join(KINDS)}.",
            )
        return rope_options | {"rotary_share": share}

    def write_more(self, options: Phi3, max_position: int) -> dict[str, Any]:
        if options.rope.kind not in KINDS:
            raise UserError(
                f"the model cannot be exported: Phi3ForCausalLM does not support rope_type={options.rope.kind}.",
                f"Phi 3 in transformers supports rope_type {' and '.join(KINDS)}.",
            )
        config_fields = super().write_more(options, max_position)
        config_fields["rope_parameters"]["partial_rotary_factor"] = options.rotary_share
        original = config_fields["rope_parameters"].get(
            "original_max_position_embeddings", config_fields["max_position_embeddings"]
        )
        return config_fields | {"original_max_position_embeddings": original}


def build(config: Phi3, run: Run | None = None) -> tuple[DecoderNode, Plan]:
    """Build the module tree of the model and its plan: rules for sharding, initialization and names."""
    q, kv = config.heads * config.head_width, config.key_heads * config.head_width
    rows = {
        "attention.wq": (0, q + 2 * kv),
        "attention.wk": (q, q + 2 * kv),
        "attention.wv": (q + kv, q + 2 * kv),
        "feed_forward.w_gate": (0, 2 * config.ffn_dim),
        "feed_forward.w_up": (config.ffn_dim, 2 * config.ffn_dim),
    }
    joined = {name: "self_attn.qkv_proj" if name.startswith("attention.") else "mlp.gate_up_proj" for name in rows}
    names = ModuleNames(LAYER | joined, rows=rows)
    return plan_family(config, lambda index: build_block(config, build_attention(config, index, run)), names=names)
