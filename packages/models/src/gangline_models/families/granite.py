"""Granite 3 (IBM, 2024): the decoder of gangline-basics with four multipliers in the style of muP (arXiv 2203.03466).

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gangline.config import PositiveFloat
from gangline.model.linear_nodes import EmbeddingNode
from gangline.plan import Plan
from gangline_basics.model.decoder_nodes import DecoderNode, HeadNode
from gangline_basics.model.decoder_tree import build_attention, build_block, build_norm
from gangline_basics.model.plan import plan_family
from gangline_models.families.base import RotaryConfig
from gangline_models.families.format import SIZES, RotaryFormat

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_models.hugging_face.config_reader import ConfigReader

MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


@dataclass
class Granite(RotaryConfig):
    """Options of Granite: multipliers of embedding, residual stream, attention scores and logits."""

    embedding_multiplier: PositiveFloat = 12.0  # multiplier of the token embeddings
    residual_multiplier: PositiveFloat = 0.22  # multiplier of sublayer outputs (attention, feed-forward)
    attention_multiplier: PositiveFloat = 0.015625  # multiplier of the attention scores, in place of 1 / sqrt(head_dim)
    logits_scaling: PositiveFloat = 8.0  # divisor of the logits


class GraniteFormat(RotaryFormat[Granite]):
    """Converter between the options of Granite and config.json."""

    options = Granite
    architectures = ("GraniteForCausalLM",)
    model_type = "granite"
    same = SIZES | {name: name for name in MULTIPLIERS}
    absent = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    silent = {
        "tied": False,
        "norm_eps": 1e-6,
        "kv_heads": None,
        **dict.fromkeys(MULTIPLIERS, 1.0),
    }

    def read_more(self, reader: ConfigReader, options: Mapping[str, Any]) -> dict[str, Any]:
        reader.expect("head_dim", None, options["dim"] // options["heads"])
        return super().read_more(reader, options)


def build(config: Granite, run: Run | None = None) -> tuple[DecoderNode, Plan]:
    """Build the module tree of the model and its plan: rules for sharding, initialization and names."""
    sizes = {"vocab_size": config.vocab_size, "dim": config.dim}
    scale, residual = config.attention_multiplier, config.residual_multiplier
    return plan_family(
        config,
        lambda index: build_block(config, build_attention(config, index, run, scale=scale), residual_scale=residual),
        embed=EmbeddingNode(**sizes, scale=config.embedding_multiplier),
        head=HeadNode(**sizes, norm=build_norm(config), z=config.z_loss, scale=1 / config.logits_scaling),
    )
