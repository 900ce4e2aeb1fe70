"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, GELU, biases everywhere. Torch-free.

In Hugging Face files the query, key and value weights are one matrix, and all matrices are transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gangline import Problem, UserError
from gangline.config import PositiveInt
from gangline.model.linear_nodes import EmbeddingNode, LinearNode
from gangline.plan import HFName, Plan
from gangline_basics.model.decoder_nodes import BlockNode, DecoderNode
from gangline_basics.model.decoder_tree import build_attention, build_block
from gangline_basics.model.names import ModuleNames
from gangline_basics.model.plan import plan_family
from gangline_models.families.base import FamilyConfig
from gangline_models.families.format import FamilyFormat
from gangline_models.nodes import (
    LayerNormNode,
    PositionedDecoderNode,
    PositionedEmbeddingNode,
    UngatedFeedForwardNode,
)

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_models.hugging_face.config_reader import ConfigReader

LAYER = {
    "attention_norm": "ln_1",
    "attention.wq": "attn.c_attn",
    "attention.wk": "attn.c_attn",
    "attention.wv": "attn.c_attn",
    "attention.wo": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.w_up": "mlp.c_fc",
    "feed_forward.w_down": "mlp.c_proj",
}
TRANSPOSED = frozenset(name for name in LAYER if "norm" not in name)
MASKS = ("attn.bias", "attn.masked_bias")
ACTIVATIONS = {"tanh": "gelu_new", "exact": "gelu"}  # Gpt2.gelu -> activation_function of config.json
SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")  # fields of heads for other tasks


@dataclass
class Gpt2(FamilyConfig):
    """Options of GPT-2: learned positions, LayerNorm, GELU, biases."""

    vocab_size: int = 50_257
    ffn_dim: int = 3072
    positions: PositiveInt = 1024  # maximum sequence length: number of learned position embeddings
    prefix: str = "transformer."  # prefix of the Hugging Face tensor names; empty in the first published files
    tied: bool = True
    norm_eps: float = 1e-5
    biases: bool = True  # biases of all linears and LayerNorms; false: none, as in nanoGPT
    gelu: Literal["tanh", "exact"] = "tanh"  # GELU activation: tanh approximation, or exact with erf

    def check(self, run: Run) -> list[Problem]:
        problems = super().check(run)
        if (length := run.batch.sequence_length) > self.positions:
            what = f"batch.sequence_length={length} is more than model.positions={self.positions}"
            problems.append(Problem(what, "Each position needs a learned embedding.", "Reduce batch.sequence_length."))
        return problems


class Gpt2Format(FamilyFormat[Gpt2]):
    """Converter between the options of GPT-2 and config.json."""

    options = Gpt2
    architectures = ("GPT2LMHeadModel",)
    model_type = "gpt2"
    same = {
        "vocab_size": "vocab_size",
        "dim": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "positions": "n_positions",
        "tied": "tie_word_embeddings",
        "norm_eps": "layer_norm_epsilon",
    }
    absent = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    silent = {"positions": 1024, "tied": True, "norm_eps": 1e-5}

    def read_more(self, reader: ConfigReader, options: Mapping[str, Any]) -> dict[str, Any]:
        from gangline_models.hugging_face.tensors import list_tensor_names

        for name in ("n_ctx", "reorder_and_upcast_attn", *(f"summary_{word}" for word in SUMMARY)):
            reader.take(name)  # ignored: obsolete, for other tasks, or only about rounding
        names = list_tensor_names(reader.directory)
        prefix = "" if "wte.weight" in names else "transformer."
        reader.expect("max_position_embeddings", None, options["positions"])  # alias of n_positions
        reader.expect("activation_function", *ACTIVATIONS.values())
        gelu = "exact" if reader.take("activation_function") == ACTIVATIONS["exact"] else "tanh"
        hidden = reader.take("n_inner", hint=PositiveInt)
        return {"ffn_dim": 4 * options["dim"] if hidden is None else hidden, "prefix": prefix, "gelu": gelu}

    def write_more(self, options: Gpt2, max_position: int) -> dict[str, Any]:
        if not options.biases:
            raise UserError(
                "the model cannot be exported: GPT2LMHeadModel does not support model.biases=false.",
                "config.json has no field for it, and transformers would require the biases.",
            )
        return {
            "activation_function": ACTIVATIONS[options.gelu],
            "n_inner": options.ffn_dim,
            "max_position_embeddings": options.positions,
        }


def build(config: Gpt2, run: Run | None = None) -> tuple[DecoderNode, Plan]:
    """Build the module tree of the model and its plan: rules for sharding, initialization and names."""
    dim, prefix, linear = config.dim, config.prefix, LinearNode(bias=config.biases)
    norm = LayerNormNode(dim=dim, eps=config.norm_eps, bias=config.biases)
    linears: dict[str, Any] = dict.fromkeys(("wq", "wk", "wv", "wo"), linear)
    feed_forward = UngatedFeedForwardNode(dim=dim, ffn_dim=config.ffn_dim, gelu=config.gelu, w_up=linear, w_down=linear)

    def make_block(index: int) -> BlockNode:
        return build_block(config, build_attention(config, index, run, **linears), norm, feed_forward=feed_forward)

    top = {"embed.tokens": "wte", "embed.positions": "wpe", "head.norm": "ln_f"}
    names = ModuleNames(
        LAYER,
        {module: f"{prefix}{name}" for module, name in top.items()} | {"head": "lm_head"},
        layers=prefix + "h.{0}.",
        transposed=TRANSPOSED,
        rows={f"attention.{name}": (index * dim, 3 * dim) for index, name in enumerate(("wq", "wk", "wv"))},
        unread=tuple(HFName(f"blocks.*.{mask}", f"{prefix}h.{{0}}.{mask}", unread="tensor") for mask in MASKS),
    )
    tokens, positions = (EmbeddingNode(vocab_size=rows, dim=dim) for rows in (config.vocab_size, config.positions))
    embed = PositionedEmbeddingNode(tokens=tokens, positions=positions)
    return plan_family(config, make_block, kind=PositionedDecoderNode, embed=embed, norm=norm, names=names)
