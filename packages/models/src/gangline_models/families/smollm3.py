"""SmolLM 3 (Hugging Face, 2025, huggingface.co/blog/smollm3): every fourth block has no rotary positions. Torch-free.

A block without rotary positions (NoPE) infers positions from the causal mask alone (Kazemnejad et al., arXiv
2305.19466; in every fourth block: Yang et al., arXiv 2501.18795).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gangline.config import PositiveInt
from gangline.plan import Plan
from gangline_basics.model.decoder_nodes import DecoderNode
from gangline_basics.model.decoder_tree import build_attention, build_block
from gangline_basics.model.plan import plan_family
from gangline_basics.model.rope_rates import Rope
from gangline_models.families.base import RotaryConfig
from gangline_models.families.format import SIZES, RotaryFormat
from gangline_models.hugging_face.layers import FULL, read_types

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_models.hugging_face.config_reader import ConfigReader


@dataclass
class SmolLM3(RotaryConfig):
    """Options of SmolLM 3: some blocks have no rotary positions (NoPE)."""

    tied: bool = True
    rope_theta: float = 2_000_000.0
    nope_every: PositiveInt | None = 4  # interval of blocks without RoPE (NoPE), the last of every n; null: none

    def get_rope(self, block: int, length: int) -> Rope | None:
        return None if self.nope_every and (block + 1) % self.nope_every == 0 else super().get_rope(block, length)


class SmolLM3Format(RotaryFormat[SmolLM3]):
    """Converter between the options of SmolLM 3 and config.json."""

    options = SmolLM3
    architectures = ("SmolLM3ForCausalLM",)
    model_type = "smollm3"
    same = SIZES
    absent = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
    }
    silent_theta = 2_000_000.0
    silent = {"tied": True, "norm_eps": 1e-6, "kv_heads": 4}

    def read_more(self, reader: ConfigReader, options: Mapping[str, Any]) -> dict[str, Any]:
        for name in ("sliding_window", "max_window_layers"):  # transformers ignores these fields in SmolLM 3
            reader.take(name)
        layers, every = options["layers"], reader.read_given("no_rope_layer_interval", 4, PositiveInt)
        if (types := read_types(reader, [FULL] * layers)) != [FULL] * layers:
            raise reader.explain("layer_types", types, f"All layers of SmolLM 3 must be {FULL}.")
        rotated = [bool((index + 1) % every) for index in range(layers)]
        if (flags := reader.take("no_rope_layers", hint=list[int])) is not None:
            rotated = [bool(each) for each in flags]
        nope_every = None if all(rotated) else rotated.index(False) + 1
        if rotated != [nope_every is None or bool((index + 1) % nope_every) for index in range(layers)]:
            raise reader.explain(
                "no_rope_layers", rotated, "gangline supports layers without RoPE only as every n-th layer."
            )
        if reader.take("head_dim") not in (None, options["dim"] // options["heads"]):
            raise reader.explain(
                "head_dim", reader.take("head_dim"), "The head width of SmolLM 3 is hidden_size / num_attention_heads."
            )
        return super().read_more(reader, options) | {"nope_every": nope_every}

    def write_more(self, options: SmolLM3, max_position: int) -> dict[str, Any]:
        every = options.nope_every
        has = [int(not every or bool((index + 1) % every)) for index in range(options.layers)]
        return super().write_more(options, max_position) | {
            "no_rope_layers": has,
            "layer_types": [FULL] * options.layers,
        }


def build(config: SmolLM3, run: Run | None = None) -> tuple[DecoderNode, Plan]:
    """Build the module tree of the model and its plan: rules for sharding, initialization and names."""
    return plan_family(config, lambda index: build_block(config, build_attention(config, index, run)))
