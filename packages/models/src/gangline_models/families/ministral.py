"""Ministral (Mistral 7B, arXiv 2310.06825, section 2): each block sees a window or all. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gangline.config import PositiveInt
from gangline.plan import Plan
from gangline_basics.model.decoder_nodes import BlockNode, DecoderNode
from gangline_models.families.base import SIZES, PatternConfig
from gangline_models.hugging_face.layers import FULL, SLIDING, layer_types, read_types, read_windows
from gangline_models.plan import LAYER, TOP, TheirNames, plan_of
from gangline_models.trees import attention_of, decoder_of, feed_forward_of, norm_of

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_models.hugging_face.config_reader import ConfigReader


@dataclass
class Ministral(PatternConfig):
    """Core's decoder with a window in some blocks."""

    architectures: ClassVar[tuple[str, ...]] = ("MinistralForCausalLM",)
    model_type: ClassVar[str] = "ministral"
    same: ClassVar[Mapping[str, str]] = SIZES | {"head_dim": "head_dim"}
    absent: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}
    silent: ClassVar[Mapping[str, Any]] = {"tied": False, "norm_eps": 1e-6, "kv_heads": 8, "head_dim": None}
    nullable: ClassVar[frozenset[str]] = frozenset(("head_dim",))

    @classmethod
    def read_more(cls, reader: ConfigReader, given: Mapping[str, Any]) -> dict[str, Any]:
        window = reader.take("sliding_window", 4096, PositiveInt)
        types = read_types(reader, [FULL if window is None else SLIDING] * given["layers"])
        return super().read_more(reader, given) | read_windows(reader, window, types)

    def more_json(self, max_position: int) -> dict[str, Any]:
        said = {"sliding_window": self.window, "layer_types": layer_types(self.windows)}
        return super().more_json(max_position) | said


def build(config: Ministral, run: Run | None = None) -> tuple[DecoderNode, Plan]:
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
    return tree, plan_of(config, tree, TheirNames(TOP, LAYER))
