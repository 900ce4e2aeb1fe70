"""OLMo 2 (arXiv 2501.00656, section 2.1) and OLMo 3: norms after attention and feed-forward. Torch-free.

Queries and keys are normalised over all heads together. OLMo 3 has a sliding window in three of four blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gangline.config import PositiveInt
from gangline.plan import Plan, ShardRule
from gangline_basics.model.decoder_nodes import BlockNode, DecoderNode
from gangline_basics.model.decoder_tree import build_attention, build_norm, feed_forward_of
from gangline_basics.model.names import LAYER, ModuleNames
from gangline_basics.model.plan import plan_family
from gangline_models.families.base import RotaryConfig, TwoRopesConfig
from gangline_models.families.format import SIZES, RotaryFormat, TwoRopesFormat
from gangline_models.hugging_face.layers import FULL, SLIDING, read_types, read_windows
from gangline_models.hugging_face.rope import read_layered_rope
from gangline_models.nodes import WidthNormNode

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_models.hugging_face.config_reader import ConfigReader

NAMES = {name: hf_name for name, hf_name in LAYER.items() if name not in ("attention_norm", "feed_forward_norm")} | {
    "attention_out_norm": "post_attention_layernorm",
    "feed_forward_out_norm": "post_feedforward_layernorm",
}
SILENT = {"tied": False, "norm_eps": 1e-5, "kv_heads": None}
ABSENT = {"hidden_act": "silu", "attention_bias": False}


@dataclass
class Olmo2(RotaryConfig):
    """Options of OLMo 2: norms after attention and feed-forward, QK norm over all heads together."""

    norm_eps: float = 1e-6
    rope_theta: float = 500_000.0


class Olmo2Format(RotaryFormat[Olmo2]):
    """Converter between the options of OLMo 2 and config.json."""

    options = Olmo2
    architectures = ("Olmo2ForCausalLM",)
    model_type = "olmo2"
    same = SIZES
    absent = ABSENT
    silent = SILENT

    def read_more(self, reader: ConfigReader, options: Mapping[str, Any]) -> dict[str, Any]:
        reader.expect("head_dim", None, options["dim"] // options["heads"])
        return super().read_more(reader, options)


@dataclass
class Olmo3(TwoRopesConfig):
    """Options of OLMo 3: OLMo 2 with a sliding window in most blocks."""

    norm_eps: float = 1e-6
    rope_theta: float = 500_000.0
    local_rope_theta: float = 500_000.0
    window: int | None = 4096
    full_every: int | None = 4


class Olmo3Format(TwoRopesFormat[Olmo3]):
    """Converter between the options of OLMo 3 and config.json."""

    options = Olmo3
    architectures = ("Olmo3ForCausalLM",)
    model_type = "olmo3"
    same = SIZES
    absent = ABSENT
    silent = SILENT

    def read_more(self, reader: ConfigReader, options: Mapping[str, Any]) -> dict[str, Any]:
        reader.expect("head_dim", None, options["dim"] // options["heads"])
        types = read_types(reader, [SLIDING if (index + 1) % 4 else FULL for index in range(options["layers"])])
        windows = read_windows(reader, reader.take("sliding_window", 4096, PositiveInt), types)
        return read_layered_rope(reader, 500_000.0, None, 500_000.0) | windows


def build(config: Olmo2 | Olmo3, run: Run | None = None) -> tuple[DecoderNode, Plan]:
    """Build the module tree of the model and its plan: rules for sharding, initialization and names."""
    norm, head = build_norm(config), config.head_width
    norms: dict[str, Any] = {
        "q_norm": WidthNormNode(dim=config.heads * head, eps=config.norm_eps),
        "k_norm": WidthNormNode(dim=config.key_heads * head, eps=config.norm_eps),
    }

    def make_block(index: int) -> BlockNode:
        return BlockNode(
            attention=build_attention(config, index, run, **norms),
            attention_out_norm=norm,
            feed_forward=feed_forward_of(config),
            feed_forward_out_norm=norm,
        )

    sharding = tuple(ShardRule.colwise(f"blocks.*.attention.{name}", head) for name in norms)
    return plan_family(config, make_block, names=ModuleNames(NAMES), sharding=sharding)
