"""Qwen3-Next (Qwen, 2025): gated delta-rule layers, and gated attention in every fourth block. Torch-free.

Norms scale by 1 + weight, and RoPE is partial. Published models have experts, which gangline-moe adds, with one gated
shared expert (`moe.shared=1 moe.shared_gate=true`). The state of a delta-rule layer passes from token to token, so
context parallelism is refused. Weights for multi-token prediction (`mtp.*`) are skipped: the model is trained
without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt, Le

from gangline import Problem, UserError
from gangline.config import PositiveInt, list_divisors
from gangline.config.fields import resolve_hints_with_ranges
from gangline.model.linear_nodes import LinearNode
from gangline.model.tree import Node
from gangline.plan import HFName, Init, Plan, ShardRule
from gangline_basics.model.decoder_nodes import AttentionNode, BlockNode, DecoderNode
from gangline_basics.model.decoder_tree import build_attention, build_block, build_norm
from gangline_basics.model.names import LAYER, ModuleNames
from gangline_basics.model.plan import plan_family
from gangline_models.delta_nodes import (
    DecayNode,
    GatedAttentionNode,
    GatedDeltaNode,
    HeadNormNode,
    RecomputedNormNode,
    ShortConvolutionNode,
)
from gangline_models.families.base import RotaryConfig
from gangline_models.families.format import SIZES, RotaryFormat
from gangline_models.hugging_face.experts import refuse_experts
from gangline_models.hugging_face.files import report_skipped
from gangline_models.hugging_face.layers import FULL, LINEAR_LAYER, read_every, read_types
from gangline_models.hugging_face.rope import SHARE, read_rope, take_fields

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_models.hugging_face.config_reader import ConfigReader

NAMES = LAYER | {
    "attention.wqkvz": "linear_attn.in_proj_qkvz",
    "attention.wba": "linear_attn.in_proj_ba",
    "attention.w_out": "linear_attn.out_proj",
    "attention.norm": "linear_attn.norm",
    "attention.decay.a_log": "linear_attn.A_log",
    "attention.decay.dt_bias": "linear_attn.dt_bias",
    **dict.fromkeys(("attention.conv_q", "attention.conv_k", "attention.conv_v"), "linear_attn.conv1d"),
}
# Tensor names of multi-token prediction have 1 to 9 components after `mtp`: `mtp.fc.weight` has two, an expert seven.
FURTHER = tuple(HFName(f"mtp.{parts}", "mtp" + ".{n}" * parts, unread="tensor") for parts in range(1, 10))
KINDS = ("default", "yarn")  # supported values of rope_type
ROUTING = (
    *("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob"),
    *("decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef", "output_router_logits"),
)


@dataclass
class Qwen3Next(RotaryConfig):
    """Options of Qwen3-Next: gated delta-rule layers and gated attention; experts come from the edit `moe`."""

    head_dim: int | None = 256
    # partial rotary factor: fraction of each head's features that RoPE rotates, counted from the first
    rotary_share: Annotated[float, Gt(0), Le(1)] = 0.25
    full_every: PositiveInt | None = 4  # interval of attention blocks (last of every n); null: no attention
    biases: bool = False  # biases of the query, key, value and output projections
    delta_key_heads: PositiveInt = 16  # number of query-key heads of a delta-rule layer
    delta_heads: PositiveInt = 32  # number of value heads of a delta-rule layer; a multiple of delta_key_heads
    delta_key_dim: PositiveInt = 128  # width of a query-key head of a delta-rule layer
    delta_value_dim: PositiveInt = 128  # width of a value head of a delta-rule layer
    delta_taps: PositiveInt = 4  # kernel size of the short causal convolution over queries, keys and values

    @property
    def rotated(self) -> int:
        return int(self.head_width * self.rotary_share)

    def attends(self, block: int) -> bool:
        """Return whether a block has attention; otherwise it has a delta-rule layer."""
        return bool(self.full_every and (block + 1) % self.full_every == 0)

    def check(self, run: Run) -> list[Problem]:
        problems = super().check(run)
        if self.delta_heads % self.delta_key_heads:
            problems.append(
                Problem(
                    f"model.delta_key_heads={self.delta_key_heads} does not divide "
                    f"model.delta_heads={self.delta_heads}",
                    "Each key head serves the same number of value heads.",
                    f"Choose model.delta_key_heads among {list_divisors(self.delta_heads)}.",
                )
            )
        return problems

    def list_notices(self, run: Run) -> list[str]:
        """Return a notice if weights for multi-token prediction are skipped."""
        return report_skipped(self.weights, "mtp.")


class Qwen3NextFormat(RotaryFormat[Qwen3Next]):
    """Converter between the options of Qwen3-Next and config.json."""

    options = Qwen3Next
    architectures = ("Qwen3NextForCausalLM",)
    model_type = "qwen3_next"
    same = SIZES | {
        "head_dim": "head_dim",
        "biases": "attention_bias",
        "delta_key_heads": "linear_num_key_heads",
        "delta_heads": "linear_num_value_heads",
        "delta_key_dim": "linear_key_head_dim",
        "delta_value_dim": "linear_value_head_dim",
        "delta_taps": "linear_conv_kernel_dim",
    }
    absent = {"hidden_act": "silu"}
    silent = {
        **{"tied": False, "norm_eps": 1e-6, "kv_heads": 2, "head_dim": 256, "biases": False, "delta_key_heads": 16},
        **{"delta_heads": 32, "delta_key_dim": 128, "delta_value_dim": 128, "delta_taps": 4},
    }
    nullable = frozenset()

    def read_more(self, reader: ConfigReader, options: Mapping[str, Any]) -> dict[str, Any]:
        refuse_experts(reader, "num_experts", 512)
        for name in ROUTING:
            reader.take(name)
        reader.expect("use_sliding_window", False)
        share = take_fields(reader).get(SHARE, reader.read_given(SHARE, 0.25))
        reader.check(SHARE, share, resolve_hints_with_ranges(Qwen3Next)["rotary_share"] | None)
        rope_options = read_rope(reader, self.silent_theta, share=True)
        if share is None or rope_options["rope"].kind not in KINDS:
            what = SHARE if share is None else "rope_type"
            raise reader.explain(
                what,
                "null" if share is None else rope_options["rope"].kind,
                f"gangline's Qwen3-Next supports rope_type {' and '.join(KINDS)}.",
            )
        every = reader.read_given("full_attention_interval", 4, PositiveInt)
        absent = [LINEAR_LAYER if (index + 1) % every else FULL for index in range(options["layers"])]
        types = read_types(reader, absent)
        return rope_options | {"rotary_share": share, "full_every": read_every(reader, types, LINEAR_LAYER)}

    def write_more(self, options: Qwen3Next, max_position: int) -> dict[str, Any]:
        if options.rope.kind not in KINDS:
            raise UserError(
                f"a Qwen3-Next model with rope_type={options.rope.kind} cannot be exported.",
                f"Supported are {' and '.join(KINDS)}, which were compared with transformers.",
            )
        config_fields = super().write_more(options, max_position)
        config_fields["rope_parameters"]["partial_rotary_factor"] = options.rotary_share
        types = [FULL if options.attends(index) else LINEAR_LAYER for index in range(options.layers)]
        return config_fields | {"layer_types": types, "num_experts": 0}


def build(config: Qwen3Next, run: Run | None = None) -> tuple[DecoderNode, Plan]:
    """Build the module tree of the model and its plan: rules for sharding, initialization and names."""
    values = config.delta_heads // config.delta_key_heads  # value heads per key head; tp keeps them together
    wide = values * config.delta_value_dim
    here, convolutions = "blocks.*.attention", ("conv_q", "conv_k", "conv_v")
    norm = build_norm(config, offset=1.0)

    def make_block(index: int) -> BlockNode:
        return build_block(
            config, _build_gated_attention(config, index, run) if config.attends(index) else _build_delta(config), norm
        )

    return plan_family(
        config,
        make_block,
        norm=norm,
        names=_make_names(config),
        sharding=(
            ShardRule.colwise(f"{here}.wq", 2 * config.head_width),
            ShardRule.colwise(f"{here}.wqkvz", 2 * config.delta_key_dim + 2 * wide),
            ShardRule.colwise(f"{here}.wba", 2 * values),
            ShardRule.rowwise(f"{here}.w_out", wide),
            *(ShardRule(f"{here}.{name}", 0, "tp", config.delta_key_dim) for name in convolutions[:2]),
            ShardRule(f"{here}.conv_v", 0, "tp", wide),
            ShardRule(f"{here}.decay", 0, "tp", values),
        ),
        inits=(  # heads start with a memory of 4 to 100 tokens (Gu and Dao, arXiv 2312.00752, section 3.6)
            Init(f"{here}.decay.a_log", "uniform", 1.5),
            Init(f"{here}.decay.dt_bias", "constant", -3.0),
            *(Init(f"{here}.{name}", "uniform", config.delta_taps**-0.5) for name in convolutions),
            Init(f"{here}.w_out", "normal", config.init_std / (2 * config.layers) ** 0.5),
        ),
        partial_grad=(f"{here}.norm",),
    )


def _build_gated_attention(config: Qwen3Next, block: int, run: Run | None) -> AttentionNode:
    norm = HeadNormNode(dim=config.head_width, eps=config.norm_eps, offset=1.0, heads=config.heads)
    own: dict[str, Any] = dict.fromkeys(("wq", "wk", "wv", "wo"), LinearNode(bias=config.biases))
    own |= {"q_norm": norm, "k_norm": replace(norm, heads=config.key_heads)}
    return build_attention(config, block, run, GatedAttentionNode, **own)


def _build_delta(config: Qwen3Next) -> Node:
    keys, values = config.delta_key_heads * config.delta_key_dim, config.delta_heads * config.delta_value_dim
    return GatedDeltaNode(
        dim=config.dim,
        key_heads=config.delta_key_heads,
        heads=config.delta_heads,
        key_dim=config.delta_key_dim,
        value_dim=config.delta_value_dim,
        conv_q=ShortConvolutionNode(channels=keys, width=config.delta_taps),
        conv_k=ShortConvolutionNode(channels=keys, width=config.delta_taps),
        conv_v=ShortConvolutionNode(channels=values, width=config.delta_taps),
        decay=DecayNode(heads=config.delta_heads),
        norm=RecomputedNormNode(dim=config.delta_value_dim, eps=config.norm_eps),
    )


def _make_names(config: Qwen3Next) -> ModuleNames:
    keys, values = config.delta_key_heads * config.delta_key_dim, config.delta_heads * config.delta_value_dim
    every = 2 * keys + values
    rows = {
        "attention.conv_q": (0, every),
        "attention.conv_k": (keys, every),
        "attention.conv_v": (2 * keys, every),
    }
    return ModuleNames(NAMES, rows=rows, unread=FURTHER)
