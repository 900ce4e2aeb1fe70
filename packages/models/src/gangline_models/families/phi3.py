"""Phi 3 (arXiv 2404.14219) and Phi 4 mini: core's decoder, of whose heads a share is rotated. Torch-free.

Their files hold queries, keys and values in one matrix, and gate and up-projection in another: the rows of ours, one
below the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Gt, Le

from gangline import UserError
from gangline.config.fields import stated
from gangline.plan import Plan
from gangline_basics.model.decoder_nodes import BlockNode, DecoderNode
from gangline_models.families.base import SIZES, WindowedConfig
from gangline_models.hugging_face.rope import SHARE, read_rope, said_of_rope
from gangline_models.plan import LAYER, TOP, TheirNames, plan_of
from gangline_models.trees import attention_of, decoder_of, feed_forward_of, norm_of

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_models.hugging_face.config_reader import ConfigReader

KINDS = ("default", "longrope")  # of rotary positions


@dataclass
class Phi3(WindowedConfig):
    """A share of each head is rotated."""

    architectures: ClassVar[tuple[str, ...]] = ("Phi3ForCausalLM",)
    model_type: ClassVar[str] = "phi3"
    same: ClassVar[Mapping[str, str]] = SIZES | {"window": "sliding_window"}
    absent: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "attention_bias": False}
    silent: ClassVar[Mapping[str, Any]] = {"tied": False, "norm_eps": 1e-5, "kv_heads": None, "window": None}
    nullable: ClassVar[frozenset[str]] = frozenset(("kv_heads", "window"))

    norm_eps: float = 1e-5
    rotary_share: Annotated[float, Gt(0), Le(1)] = 1.0  # of the features of a head: so many are rotated, the first ones

    @property
    def rotated(self) -> int:
        return int(self.head_width * self.rotary_share)

    @classmethod
    def read_more(cls, reader: ConfigReader, given: Mapping[str, Any]) -> dict[str, Any]:
        reader.only("head_dim", None, given["dim"] // given["heads"])
        for name, value in (
            ("mlp_bias", False),
            ("lm_head_bias", False),
            ("full_attn_mod", 1),
            ("interpolate_factor", 1),
        ):
            reader.only(name, value)
        share = said_of_rope(reader).get(SHARE, reader.given(SHARE, 1.0))
        reader.checked(SHARE, share, stated(cls)["rotary_share"] | None)
        found = read_rope(reader, cls.silent_theta, original=4096, share=True)
        if share is None or found["rope"].kind not in KINDS:
            what = SHARE if share is None else "rope_type"
            raise reader.refused(what, share or found["rope"].kind, f"transformers has {' and '.join(KINDS)} there.")
        return found | {"rotary_share": share}

    def more_json(self, max_position: int) -> dict[str, Any]:
        if self.rope.kind not in KINDS:
            raise UserError(
                f"a Phi 3 with rotary positions of type {self.rope.kind} has no Hugging Face architecture.",
                f"transformers has {' and '.join(KINDS)} there.",
            )
        said = super().more_json(max_position)
        said["rope_parameters"]["partial_rotary_factor"] = self.rotary_share
        original = said["rope_parameters"].get("original_max_position_embeddings", said["max_position_embeddings"])
        return said | {"original_max_position_embeddings": original}


def build(config: Phi3, run: Run | None = None) -> tuple[DecoderNode, Plan]:
    """The tree and its plan."""
    norm = norm_of(config)
    blocks = (
        BlockNode(
            attention_norm=norm,
            attention=attention_of(config, index, run),
            feed_forward_norm=norm,
            feed_forward=feed_forward_of(config),
        )
        for index in range(config.layers)
    )
    tree = decoder_of(config, tuple(blocks))
    return tree, plan_of(config, tree, _theirs(config))


def _theirs(config: Phi3) -> TheirNames:
    q, kv = config.heads * config.head_width, config.key_heads * config.head_width
    rows = {
        "attention.wq": (0, q + 2 * kv),
        "attention.wk": (q, q + 2 * kv),
        "attention.wv": (q + kv, q + 2 * kv),
        "feed_forward.w_gate": (0, 2 * config.hidden),
        "feed_forward.w_up": (config.hidden, 2 * config.hidden),
    }
    joined = dict.fromkeys(("attention.wq", "attention.wk", "attention.wv"), "self_attn.qkv_proj")
    joined |= dict.fromkeys(("feed_forward.w_gate", "feed_forward.w_up"), "mlp.gate_up_proj")
    return TheirNames(TOP, LAYER | joined, rows=rows)
