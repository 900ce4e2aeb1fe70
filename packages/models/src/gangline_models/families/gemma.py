"""Gemma 2 (arXiv 2408.00118, section 2) and Gemma 3 (arXiv 2503.19786, section 2). Torch-free.

Both: norms before and after attention and feed-forward, with scale 1 + weight; token embeddings times sqrt(D);
GELU in place of SiLU (GEGLU); sliding windows in some blocks. Gemma 2 bounds attention scores and logits by soft caps;
Gemma 3 instead has QK norm, and a separate RoPE base in blocks with a sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gangline.config import PositiveFloat, PositiveInt
from gangline.model.linear_nodes import EmbeddingNode
from gangline.plan import Plan
from gangline_basics.model.decoder_nodes import BlockNode, DecoderNode, HeadNode, NormNode
from gangline_basics.model.decoder_tree import build_attention, build_block, build_norm, feed_forward_of
from gangline_basics.model.gating import Gating
from gangline_basics.model.names import LAYER, ModuleNames
from gangline_basics.model.plan import plan_family
from gangline_models.families.base import PatternConfig, TwoRopesConfig
from gangline_models.families.format import SIZES, PatternFormat, TwoRopesFormat
from gangline_models.hugging_face.layers import FULL, SLIDING, read_types, read_windows
from gangline_models.hugging_face.rope import read_layered_rope

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_models.hugging_face.config_reader import ConfigReader

GEGLU = Gating(activation="gelu_tanh")
NAMES = LAYER | {
    "attention_out_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_out_norm": "post_feedforward_layernorm",
}
SAME = SIZES | {"head_dim": "head_dim", "query_scalar": "query_pre_attn_scalar"}
SILENT = {"tied": True, "norm_eps": 1e-6, "kv_heads": 4, "head_dim": 256, "query_scalar": 256}
ABSENT = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": None}


@dataclass
class Gemma2(PatternConfig):
    """Options of Gemma 2: soft caps, norms before and after sublayers, a sliding window in every second block."""

    tied: bool = True
    query_scalar: PositiveFloat = 256.0  # query scalar: attention scores are divided by its square root
    soft_cap: PositiveFloat | None = 50.0  # soft cap of the attention scores, cap · tanh(scores / cap); null: no cap
    logit_soft_cap: PositiveFloat | None = 30.0  # soft cap of the logits; null: no cap
    window: int | None = 4096
    full_every: int | None = 2


class Gemma2Format(PatternFormat[Gemma2]):
    """Converter between the options of Gemma 2 and config.json."""

    options = Gemma2
    architectures = ("Gemma2ForCausalLM",)
    model_type = "gemma2"
    same = SAME | {
        "soft_cap": "attn_logit_softcapping",
        "logit_soft_cap": "final_logit_softcapping",
    }
    absent = ABSENT
    silent = SILENT | {"soft_cap": 50.0, "logit_soft_cap": 30.0}
    nullable = frozenset(("soft_cap", "logit_soft_cap"))

    def read_more(self, reader: ConfigReader, options: Mapping[str, Any]) -> dict[str, Any]:
        for name in ("hidden_act", "sliding_window_size"):  # transformers reads hidden_activation and sliding_window
            reader.take(name)
        types = read_types(reader, [SLIDING if (index + 1) % 2 else FULL for index in range(options["layers"])])
        windows = read_windows(reader, reader.take("sliding_window", 4096, PositiveInt), types)
        return super().read_more(reader, options) | windows

    def write_more(self, options: Gemma2, max_position: int) -> dict[str, Any]:
        return super().write_more(options, max_position) | make_scalar_json(options.query_scalar)


@dataclass
class Gemma3(TwoRopesConfig):
    """Options of Gemma 3: QK norm, norms before and after sublayers, two RoPE bases."""

    tied: bool = True
    query_scalar: PositiveFloat = 256.0  # query scalar: attention scores are divided by its square root
    rope_theta: float = 1_000_000.0
    window: int | None = 1024
    full_every: int | None = 6


class Gemma3Format(TwoRopesFormat[Gemma3]):
    """Converter between the options of Gemma 3 and config.json."""

    options = Gemma3
    architectures = ("Gemma3ForCausalLM",)
    model_type = "gemma3_text"
    same = SAME
    absent = ABSENT | {
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    silent = SILENT
    nullable = frozenset()

    def read_more(self, reader: ConfigReader, options: Mapping[str, Any]) -> dict[str, Any]:
        reader.take("hidden_act")
        layers, every = range(options["layers"]), reader.read_given("sliding_window_pattern", 6, PositiveInt)
        types = read_types(reader, [SLIDING if (index + 1) % every else FULL for index in layers])
        windows = read_windows(reader, reader.take("sliding_window", 4096, PositiveInt), types)
        return read_layered_rope(reader, 1_000_000.0, "rope_local_base_freq", 10_000.0) | windows

    def write_more(self, options: Gemma3, max_position: int) -> dict[str, Any]:
        return super().write_more(options, max_position) | make_scalar_json(options.query_scalar)


def make_scalar_json(query_scalar: float) -> dict[str, Any]:
    """Return query_pre_attn_scalar, as an integer if possible: transformers does not accept 256.0."""
    return {"query_pre_attn_scalar": int(query_scalar) if query_scalar == int(query_scalar) else query_scalar}


def build(config: Gemma2 | Gemma3, run: Run | None = None) -> tuple[DecoderNode, Plan]:
    """Build the module tree of the model and its plan: rules for sharding, initialization and names."""
    norm, cap = build_norm(config, offset=1.0), None
    own: dict[str, Any] = {"scale": config.query_scalar**-0.5}
    if isinstance(config, Gemma2):
        cap, own["soft_cap"] = config.logit_soft_cap, config.soft_cap
    else:
        own |= dict.fromkeys(("q_norm", "k_norm"), NormNode(dim=config.head_width, eps=config.norm_eps, offset=1.0))

    def make_block(index: int) -> BlockNode:
        return build_block(
            config,
            build_attention(config, index, run, **own),
            norm,
            attention_out_norm=norm,
            feed_forward=feed_forward_of(config, gating=GEGLU),
            feed_forward_out_norm=norm,
        )

    sizes = {"vocab_size": config.vocab_size, "dim": config.dim}
    return plan_family(
        config,
        make_block,
        embed=EmbeddingNode(**sizes, scale=config.dim**0.5),
        head=HeadNode(**sizes, norm=norm, z=config.z_loss, soft_cap=cap),
        names=ModuleNames(NAMES),
    )
