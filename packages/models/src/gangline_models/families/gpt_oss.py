"""gpt-oss (arXiv 2508.10925, section 2): attention sinks, windows, biases, clamped SwiGLU. Torch-free.

An attention sink is a learned logit per head that is added to the softmax denominator (Xiao et al., arXiv 2309.17453).
Every second block has a sliding window. Published gpt-oss models have experts, which gangline-moe adds to this model. A
dense model can be trained, but its feed-forwards have no names in Hugging Face files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gangline.config import PositiveFloat, PositiveInt
from gangline.model.linear_nodes import LinearNode
from gangline.plan import Plan
from gangline_basics.model.decoder_nodes import BlockNode, DecoderNode, SinksNode
from gangline_basics.model.decoder_tree import BIASED, build_attention, build_block, feed_forward_of
from gangline_basics.model.gating import Gating
from gangline_basics.model.names import LAYER, ModuleNames
from gangline_basics.model.plan import plan_family
from gangline_models.families.base import PatternConfig
from gangline_models.families.format import SIZES, PatternFormat
from gangline_models.hugging_face.experts import refuse_experts, refuse_packed
from gangline_models.hugging_face.layers import FULL, SLIDING, read_types, read_windows
from gangline_models.hugging_face.rope import read_rope
from gangline_models.rope.base import RopeChoice
from gangline_models.rope.yarn import YarnRope

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_models.hugging_face.config_reader import ConfigReader

NAMES = {name: hf_name for name, hf_name in LAYER.items() if not name.startswith("feed_forward.")}
LINEARS = ("w_gate", "w_up", "w_down")


def build_rope() -> YarnRope:
    """Build the YaRN options that are the default of gpt-oss in transformers."""
    return YarnRope(factor=32.0, original_max_position=4096, truncate=False)


@dataclass
class GptOss(PatternConfig):
    """Options of gpt-oss: attention sinks, windows, biases, clamped SwiGLU; experts are added by the edit `moe`."""

    norm_eps: float = 1e-5
    rope_theta: float = 150_000.0
    rope: RopeChoice = field(default_factory=build_rope)
    window: int | None = 128
    full_every: int | None = 2
    biases: bool = True  # biases of the query, key, value and output projections
    slope: PositiveFloat = 1.702  # slope of the sigmoid in the SwiGLU gate (swiglu_alpha)
    limit: PositiveFloat = 7.0  # limit at which outputs of gate and up-projection are clamped (swiglu_limit)


class GptOssFormat(PatternFormat[GptOss]):
    """Converter between the options of gpt-oss and config.json."""

    options = GptOss
    architectures = ("GptOssForCausalLM",)
    model_type = "gpt_oss"
    same = SIZES | {
        "head_dim": "head_dim",
        "biases": "attention_bias",
        "slope": "swiglu_alpha",
        "limit": "swiglu_limit",
    }
    absent = {"hidden_act": "silu"}
    silent_theta = 150_000.0
    silent = {
        **{"tied": False, "norm_eps": 1e-5, "kv_heads": 8, "head_dim": 64, "biases": True},
        **{"slope": 1.702, "limit": 7.0},
    }
    nullable = frozenset(("kv_heads", "head_dim"))

    def read_more(self, reader: ConfigReader, options: Mapping[str, Any]) -> dict[str, Any]:
        refuse_packed(reader, "quantization_config")
        refuse_experts(reader, "num_local_experts", 128)
        for name in ("experts_per_token", "initial_context_length"):  # transformers reads other fields instead
            reader.take(name)
        rope_fields = reader.take("rope_parameters") is not None or reader.take("rope_scaling")
        rope_options = read_rope(reader, self.silent_theta)
        if not rope_fields:
            rope_options["rope"] = build_rope()
        types = read_types(reader, [FULL if (index + 1) % 2 == 0 else SLIDING for index in range(options["layers"])])
        return rope_options | read_windows(reader, reader.take("sliding_window", 128, PositiveInt), types)

    def write_more(self, options: GptOss, max_position: int) -> dict[str, Any]:
        return super().write_more(options, max_position) | {"num_local_experts": 0}


def build(config: GptOss, run: Run | None = None) -> tuple[DecoderNode, Plan]:
    """Build the module tree of the model and its plan: rules for sharding, initialization and names."""
    own: dict[str, Any] = dict.fromkeys(("wq", "wk", "wv", "wo"), LinearNode(bias=config.biases))
    own["sinks"] = SinksNode(heads=config.heads)
    gating = Gating(slope=config.slope, limit=config.limit, offset=1.0)
    feed_forward = feed_forward_of(config, gating=gating, **dict.fromkeys(LINEARS, BIASED))

    def make_block(index: int) -> BlockNode:
        return build_block(config, build_attention(config, index, run, **own), feed_forward=feed_forward)

    return plan_family(config, make_block, names=ModuleNames(NAMES))
