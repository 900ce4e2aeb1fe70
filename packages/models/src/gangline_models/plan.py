"""The plan of a family's tree: cuts, first weights and names, each rule kept where the tree has something for it.

Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING, Any

from gangline.model.tree import by_path, nodes, parameter_shapes
from gangline.plan import Cut, Init, Name, Plan, Seam
from gangline_basics.model.decoder_nodes import DecoderNode, NormNode, SinksNode
from gangline_models.nodes import LayerNormNode, WidthNormNode

if TYPE_CHECKING:
    from gangline_models.families.base import FamilyConfig

# Module of ours -> of theirs, as most families name them; in a block behind "model.layers.{0}.".
TOP = {"embed": "model.embed_tokens", "head.norm": "model.norm", "head": "lm_head"}
LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.w_gate": "mlp.gate_proj",
    "feed_forward.w_up": "mlp.up_proj",
    "feed_forward.w_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class TheirNames:
    """What others call the modules.

    layer       of each block; a parameter that they call otherwise than its module stands there itself, and one that
                is not there has no name: they have no such model
    layers      what a layer's names begin with; {0} is its number
    transposed  modules of a layer whose matrix lies the other way there
    rows        module of a layer -> (first, of): it is those rows of a matrix of several modules (`Name.rows`)
    """

    top: Mapping[str, str]
    layer: Mapping[str, str]
    layers: str = "model.layers.{0}."
    transposed: frozenset[str] = frozenset()
    rows: Mapping[str, tuple[int, int]] | None = None
    computed: tuple[str, ...] = ()  # of each layer: what files hold and no weight is, such as a mask
    further: tuple[str, ...] = ()  # of layers behind the last, which are not read: what no other layer holds

    def names(self, parameters: Iterable[str]) -> tuple[Name, ...]:
        """A rule for each parameter of the first block and outside of blocks, as all blocks are alike."""
        found = dict[str, Name]()
        for parameter in parameters:
            path, _, leaf = parameter.rpartition(".")
            if not path.startswith("blocks."):
                found[parameter] = Name(parameter, f"{self.top[path]}.{leaf}")
                continue
            module = path.split(".", 2)[2]
            pattern = f"blocks.*.{module}.{leaf}"
            called = self.layer.get(f"{module}.{leaf}") or (self.layer.get(module) and f"{self.layer[module]}.{leaf}")
            if called is None:
                continue
            theirs = f"{self.layers}{called}"
            rows = (self.rows or {}).get(module)
            turned = module in self.transposed and leaf == "weight"
            found[pattern] = Name(pattern, theirs, "transpose" if turned else "same", rows)
        masks = (Name(f"blocks.*.{name}", f"{self.layers}{name}", unread="tensor") for name in self.computed)
        further = (Name(f"blocks.*.{name}", f"{self.layers}{name}", unread="layer") for name in self.further)
        return (*found.values(), *masks, *further)


def plan_of(config: FamilyConfig, tree: DecoderNode, theirs: TheirNames, **own: tuple[Any, ...]) -> Plan:
    """How the tree may be cut (Shoeybi et al., arXiv 1909.08053, section 3), drawn and named.

    own: rules of the family's own modules (`Plan.extended`), before those of all.
    Matrices are drawn with std `init_std`, those of a block that write to the residual stream with 1 / sqrt(2 · layers)
    of it (GPT-2, section 2.3); norms begin as the identity, biases as 0.
    """
    head = config.head_width
    shapes, found = parameter_shapes(tree), by_path(tree)
    layers = [found[f"blocks.{index}.attention"] for index in range(config.layers)]
    norms = {(name, getattr(layer, name, None)) for layer in layers for name in ("q_norm", "k_norm")}
    over_all = sorted(name for name, norm in norms if isinstance(norm, WidthNormNode))
    over_each = sorted(name for name, norm in norms if norm is not None and name not in over_all)
    plan = Plan(
        embed="embed",
        blocks="blocks",
        head="head",
        layers=config.layers,
        cuts=(
            Cut("embed.weight", 0),
            Cut("embed.tokens.weight", 0),
            Cut.colwise("blocks.*.attention.wq", head),
            Cut.colwise("blocks.*.attention.wk", head),
            Cut.colwise("blocks.*.attention.wv", head),
            Cut.rowwise("blocks.*.attention.wo", head),
            Cut("blocks.*.attention.sinks", 0),
            *(Cut.colwise(f"blocks.*.attention.{name}", head) for name in over_all),
            Cut.colwise("blocks.*.feed_forward.w_gate"),
            Cut.colwise("blocks.*.feed_forward.w_up"),
            Cut.rowwise("blocks.*.feed_forward.w_down"),
            Cut("head.weight", 0),
        ),
        inits=(*dict.fromkeys(_identities(tree)), *_drawn(config.init_std, config.init_std / sqrt(2 * config.layers))),
        names=theirs.names((*shapes, *tree.ties())),
        tied=tuple(tree.ties().items()),
        seams=(Seam("attention", "blocks.*.attention"), Seam("loss", "head")),
        partial_grad=tuple(f"blocks.*.attention.{name}" for name in over_each),
        facts={
            "layers": config.layers,
            "dim": config.dim,
            "heads": config.heads,
            "kv_heads": config.key_heads,
            "head_dim": head,
            "hidden": config.hidden,
            "vocab_size": config.vocab_size,
        },
    )
    plan = plan.extended(**own)
    mistaken = set(plan.unmatched(shapes))
    return replace(
        plan,
        cuts=tuple(cut for cut in plan.cuts if cut.pattern not in mistaken),
        inits=tuple(init for init in plan.inits if init.pattern not in mistaken),
    )


def _identities(tree: DecoderNode) -> Iterator[Init]:
    """Biases and sinks of 0, and norms that only normalise."""
    for path, node in nodes(tree):
        pattern = re.sub(r"^blocks\.\d+\.", "blocks.*.", path)
        if "bias" in node.shapes():
            yield Init(f"{pattern}.bias", "constant", 0.0)
        if isinstance(node, SinksNode):
            yield Init(f"{pattern}.weight", "constant", 0.0)
        if isinstance(node, NormNode | LayerNormNode):
            yield Init(f"{pattern}.weight", "constant", 1.0 - (node.offset if isinstance(node, NormNode) else 0.0))


def _drawn(std: float, residual: float) -> Iterator[Init]:
    yield Init("embed", "normal", std)
    yield Init("blocks.*.attention.wo", "normal", residual)
    yield Init("blocks.*.feed_forward.w_down", "normal", residual)
    yield Init("blocks.*.attention", "normal", std)
    yield Init("blocks.*.feed_forward", "normal", std)
    yield Init("head.weight", "normal", std)
