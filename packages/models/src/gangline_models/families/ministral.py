"""Ministral (Mistral 7B, arXiv 2310.06825, section 2): sliding window or full attention per block. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gangline.config import PositiveInt
from gangline.plan import Plan
from gangline_basics.model.decoder_nodes import DecoderNode
from gangline_basics.model.decoder_tree import build_attention, build_block
from gangline_basics.model.plan import plan_family
from gangline_models.families.base import PatternConfig
from gangline_models.families.format import SIZES, PatternFormat
from gangline_models.hugging_face.layers import FULL, SLIDING, read_types, read_windows

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_models.hugging_face.config_reader import ConfigReader


@dataclass
class Ministral(PatternConfig):
    """Options of Ministral: the decoder of gangline-basics with a sliding window in some blocks."""


class MinistralFormat(PatternFormat[Ministral]):
    """Converter between the options of Ministral and config.json."""

    options = Ministral
    architectures = ("MinistralForCausalLM",)
    model_type = "ministral"
    same = SIZES | {"head_dim": "head_dim"}
    absent = {"hidden_act": "silu"}
    silent = {"tied": False, "norm_eps": 1e-6, "kv_heads": 8, "head_dim": None}
    nullable = frozenset(("head_dim",))

    def read_more(self, reader: ConfigReader, options: Mapping[str, Any]) -> dict[str, Any]:
        window = reader.take("sliding_window", 4096, PositiveInt)
        types = read_types(reader, [FULL if window is None else SLIDING] * options["layers"])
        return super().read_more(reader, options) | read_windows(reader, window, types)


def build(config: Ministral, run: Run | None = None) -> tuple[DecoderNode, Plan]:
    """Build the module tree of the model and its plan: rules for sharding, initialization and names."""
    return plan_family(config, lambda index: build_block(config, build_attention(config, index, run)))
