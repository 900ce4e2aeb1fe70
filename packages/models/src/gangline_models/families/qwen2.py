"""Qwen2 and Qwen2.5 (arXiv 2407.10671, section 2.2.1; 2412.15115): biases on queries, keys and values. Torch-free.

Blocks from index `max_window_layers` on may have a sliding window; the published models have full attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gangline.config import NonNegativeInt, PositiveInt
from gangline.plan import Plan
from gangline_basics.model.decoder_nodes import DecoderNode
from gangline_basics.model.decoder_tree import BIASED, build_attention, build_block
from gangline_basics.model.plan import plan_family
from gangline_models.families.base import PatternConfig
from gangline_models.families.format import SIZES, PatternFormat
from gangline_models.hugging_face.layers import FULL, SLIDING, list_layer_types, read_types, read_windows

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_models.hugging_face.config_reader import ConfigReader


@dataclass
class Qwen2(PatternConfig):
    """Options of Qwen2: biases on queries, keys and values."""

    rope_theta: float = 1_000_000.0


class Qwen2Format(PatternFormat[Qwen2]):
    """Converter between the options of Qwen2 and config.json."""

    options = Qwen2
    architectures = ("Qwen2ForCausalLM",)
    model_type = "qwen2"
    same = SIZES | {"head_dim": "head_dim"}
    absent = {"hidden_act": "silu"}
    silent = {"tied": False, "norm_eps": 1e-6, "kv_heads": 32, "head_dim": None}
    nullable = frozenset(("kv_heads", "head_dim"))

    def read_more(self, reader: ConfigReader, options: Mapping[str, Any]) -> dict[str, Any]:
        reader.expect("use_mrope", False)
        window = reader.take("sliding_window", 4096, PositiveInt)
        first = reader.read_given("max_window_layers", 28, NonNegativeInt)
        if not reader.read_given("use_sliding_window", False, bool):
            window = None
        absent = [SLIDING if window is not None and index >= first else FULL for index in range(options["layers"])]
        return super().read_more(reader, options) | read_windows(reader, window, read_types(reader, absent))

    def write_more(self, options: Qwen2, max_position: int) -> dict[str, Any]:
        types = list_layer_types(options.windows)
        return super().write_more(options, max_position) | {
            "use_sliding_window": options.window is not None,
            "max_window_layers": types.index(SLIDING) if SLIDING in types else options.layers,
        }


def build(config: Qwen2, run: Run | None = None) -> tuple[DecoderNode, Plan]:
    """Build the module tree of the model and its plan: rules for sharding, initialization and names."""
    biased: dict[str, Any] = dict.fromkeys(("wq", "wk", "wv"), BIASED)
    return plan_family(config, lambda index: build_block(config, build_attention(config, index, run, **biased)))
