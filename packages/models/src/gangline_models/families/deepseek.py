"""DeepSeek-V3 (arXiv 2412.19437, section 2.1): latent attention (MLA); experts are added by gangline-moe. Torch-free.

In the published model the first blocks are dense and the others have experts (`moe.first`, `moe.shared`,
`moe/router=grouped`). A model with only dense blocks is valid too. Weights for multi-token prediction (MTP, section
2.2) are loaded with mtp=on, and skipped otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gangline import Problem
from gangline.config import NonNegativeInt, PositiveFloat, PositiveInt
from gangline.model.linear_nodes import LinearNode
from gangline.plan import HFName, Plan, ShardRule
from gangline_basics.model.decoder_nodes import DecoderNode, NormNode
from gangline_basics.model.decoder_tree import build_block, get_length
from gangline_basics.model.names import LAYER, ModuleNames
from gangline_basics.model.plan import plan_family
from gangline_basics.model.rope_rates import Rope
from gangline_models.families.base import FamilyConfig
from gangline_models.families.format import SIZES, FamilyFormat
from gangline_models.hugging_face.experts import refuse_experts, refuse_packed
from gangline_models.hugging_face.files import report_skipped
from gangline_models.hugging_face.rope import read_rope
from gangline_models.latent_nodes import LatentUpNode, MlaNode
from gangline_models.rope.base import PlainRope, RopeChoice
from gangline_models.rope.yarn import YarnRope

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_models.hugging_face.config_reader import ConfigReader

NAMES = LAYER | {
    "attention.wq": "self_attn.q_proj",
    "attention.q.down": "self_attn.q_a_proj",
    "attention.q.norm": "self_attn.q_a_layernorm",
    "attention.q.up": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv.norm": "self_attn.kv_a_layernorm",
    "attention.kv.up": "self_attn.kv_b_proj",
}
# Tensors of layers after the last block, for multi-token prediction (MTP).
FURTHER = tuple(
    HFName(f"blocks.*.{name}.weight", f"model.layers.{{0}}.{name}.weight", unread="layer")
    for name in ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.norm", "shared_head.head")
)
INNER_EPS = 1e-6  # epsilon of the norms of latent vectors; rms_norm_eps does not apply
ROUTING = (
    *("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "num_experts_per_tok", "n_shared_experts"),
    *("moe_intermediate_size", "router_aux_loss_coef", "output_router_logits", "ep_size", "aux_loss_alpha", "seq_aux"),
)
# ignored fields: they follow from other fields, or belong to MTP
PASSED = ("qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers")


@dataclass
class DeepSeek(FamilyConfig):
    """Options of DeepSeek-V3: latent attention; experts come from the edit `moe`."""

    q_rank: PositiveInt | None = 1536  # rank of the latent query vector (q_lora_rank); null: no latent query
    kv_rank: PositiveInt = 512  # rank of the latent key-value vector (kv_lora_rank)
    nope_dim: PositiveInt = 128  # number of query and key features per head without RoPE
    # number of query and key features per head with RoPE; all heads share these key features
    rope_dim: PositiveInt = 64
    v_dim: PositiveInt = 128  # width of an attention head's values
    # interleaved RoPE: rotation of pairs of neighbouring features; false: pairs of features model.rope_dim / 2 apart
    interleaved: bool = True
    biases: bool = False  # biases of the down-projections to latent vectors and of the output projection
    rope_theta: PositiveFloat = 10_000.0  # RoPE base (theta)
    rope: RopeChoice = field(default_factory=PlainRope)

    @property
    def head_width(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def rotated(self) -> int:
        """Number of features per head that RoPE rotates."""
        return self.rope_dim

    @property
    def scale(self) -> float:
        """Scale of the attention scores: 1 / sqrt(head width), times the square of YaRN's `mscale_all_dim` term."""
        magnitude = 1.0
        if isinstance(self.rope, YarnRope) and self.rope.mscale_all_dim and self.rope.factor > 1:
            magnitude = 0.1 * self.rope.mscale_all_dim * math.log(self.rope.factor) + 1
        return float(self.head_width**-0.5 * magnitude * magnitude)

    def get_rope(self, block: int, length: int) -> Rope:
        from gangline.plugin.registry import build

        return Rope(self.rope_theta, build(self.rope, length), self.rope_dim)

    def check(self, run: Run) -> list[Problem]:
        if self.rope_dim % 2 == 0:
            return []
        what = f"model.rope_dim={self.rope_dim} is odd"
        return [Problem(what, "RoPE rotates features in pairs.", f"Set model.rope_dim={self.rope_dim + 1}.")]

    def list_notices(self, run: Run) -> list[str]:
        """Return a notice if the directory has MTP layers, after the last block, that mtp=on does not load."""
        depth = getattr(run.edits.get("mtp"), "depth", 0)
        return report_skipped(self.weights, f"model.layers.{self.layers + depth}.")


class DeepSeekFormat(FamilyFormat[DeepSeek]):
    """Converter between the options of DeepSeek-V3 and config.json."""

    options = DeepSeek
    architectures = ("DeepseekV3ForCausalLM",)
    model_type = "deepseek_v3"
    same = {name: key for name, key in SIZES.items() if name != "kv_heads"} | {
        "q_rank": "q_lora_rank",
        "kv_rank": "kv_lora_rank",
        "nope_dim": "qk_nope_head_dim",
        "rope_dim": "qk_rope_head_dim",
        "v_dim": "v_head_dim",
        "interleaved": "rope_interleave",
        "biases": "attention_bias",
    }
    absent = {"hidden_act": "silu"}
    silent = {
        **{"tied": False, "norm_eps": 1e-6, "q_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64},
        **{"v_dim": 128, "interleaved": True, "biases": False},
    }
    nullable = frozenset(("q_rank",))

    def read_more(self, reader: ConfigReader, options: Mapping[str, Any]) -> dict[str, Any]:
        refuse_packed(reader, "quantization_config")
        dense = reader.read_given("first_k_dense_replace", 3, NonNegativeInt)
        if dense < options["layers"]:
            refuse_experts(reader, "n_routed_experts", 256)
        for name in (*ROUTING, *PASSED, "n_routed_experts"):
            reader.take(name)
        for name, value in (("moe_layer_freq", 1), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            reader.expect(name, value)
        reader.expect("head_dim", None, options["rope_dim"])  # transformers uses head_dim as the rotated width
        if (key_heads := reader.take("num_key_value_heads", 128)) not in (options["heads"], None):
            raise reader.explain(
                "num_key_value_heads", key_heads, "The value must equal num_attention_heads: each head has its own key."
            )
        return read_rope(reader, 10_000.0)

    def write_more(self, options: DeepSeek, max_position: int) -> dict[str, Any]:
        return {
            "num_key_value_heads": options.heads,
            "first_k_dense_replace": options.layers,
            "num_nextn_predict_layers": 0,
            "rope_parameters": {"rope_theta": options.rope_theta, **options.rope.to_json()},
            "max_position_embeddings": options.rope.compute_max_position(max_position),
        }


def build(config: DeepSeek, run: Run | None = None) -> tuple[DecoderNode, Plan]:
    """Build the module tree of the model and its plan: rules for sharding, initialization and names."""
    q, kv = config.head_width, config.nope_dim + config.v_dim
    sharding = (
        ShardRule.colwise("blocks.*.attention.wq", q),
        ShardRule.colwise("blocks.*.attention.q.up", q),
        ShardRule.colwise("blocks.*.attention.kv.up", kv),
        ShardRule.rowwise("blocks.*.attention.wo", config.v_dim),
    )
    names = ModuleNames(NAMES, unread=FURTHER)
    return plan_family(
        config,
        lambda index: build_block(config, _build_latent_attention(config, index, run)),
        names=names,
        sharding=sharding,
    )


def _build_latent_attention(config: DeepSeek, block: int, run: Run | None) -> MlaNode:
    biased = LinearNode(bias=config.biases)
    queries: dict[str, Any] = {"wq": LinearNode()}
    if config.q_rank is not None:
        queries = {"q": _make_up(config, config.q_rank, config.head_width, biased)}
    return MlaNode(
        dim=config.dim,
        heads=config.heads,
        nope_dim=config.nope_dim,
        rope_dim=config.rope_dim,
        v_dim=config.v_dim,
        rope=config.get_rope(block, get_length(run)),
        interleaved=config.interleaved,
        scale=config.scale,
        backend=config.attention_backend,
        wkv_a=biased,
        kv=_make_up(config, config.kv_rank, config.nope_dim + config.v_dim),
        wo=biased,
        **queries,
    )


def _make_up(config: DeepSeek, rank: int, width: int, down: LinearNode | None = None) -> LatentUpNode:
    norm = NormNode(dim=rank, eps=INNER_EPS)
    return LatentUpNode(dim=config.dim, rank=rank, out=config.heads * width, down=down, norm=norm)
