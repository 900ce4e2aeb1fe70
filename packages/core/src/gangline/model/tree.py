"""What a model is made of: a tree of frozen config nodes. Torch-free.

Each node names the module it builds, so a foreign node needs no table here; the path of a node
in the tree ("blocks.3.feed_forward") is the name of its module in the model. A model edit replaces nodes.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import ClassVar, Literal

from gangline.model.calls import AttentionCall, Call, LossCall
from gangline.model.gating import SWIGLU, Gating
from gangline.model.local_sizes import CommVolume, LocalSizes
from gangline.model.products import AttentionProduct, Product, of_shapes
from gangline.model.rope_rates import PLAIN_ROPE, Rope

Shape = tuple[int, ...]
Decoding = Literal["tokenwise", "cached"]


@dataclass(frozen=True, kw_only=True)
class Node(ABC):
    """One module as data. `module` is "package.module:Class"; its constructor takes the node and nothing else."""

    module: ClassVar[str]

    def shapes(self) -> dict[str, Shape]:
        """Global shapes of the parameters of this node's module that lie in no child node, by their name in it."""
        return {}

    def flops(self, sequence_length: int) -> int:
        """Forward floating-point operations for one token, children left out: two for each weight of a product.

        What has two dims and more counts as multiplied once by each token; a node where that is not so overrides this.
        """
        return sum(2 * prod(shape) for shape in self.shapes().values() if len(shape) > 1)

    def products(self, sizes: LocalSizes, sequence_length: int) -> tuple[Product, ...] | None:
        """What a forward pass of `sizes.tokens` tokens multiplies, children left out and nothing cut, as shapes.

        Together they come to `flops`: a node whose products do not is one that does not say. None: it does not."""
        return of_shapes(self.shapes(), sizes.tokens)

    def activation_bytes(self, sizes: LocalSizes) -> int | None:
        """Bytes that the forward pass of a microbatch keeps for the backward pass on a rank, children left out.

        An input that is kept counts, an output does not: that counts where it is read. None: guess from the shapes.
        """
        return None

    def communication_volume(self, sizes: LocalSizes) -> tuple[CommVolume, ...]:
        """What this module sends over folds, children left out; nothing where `sizes` has one rank for them.

        For a module on a fold (`gangline.plan.Fold`) that communicates through the Comm that `bind` gave it: only the
        node knows what crosses. What a strategy sends for it (gradients) is not part of it."""
        return ()

    def seams(self) -> Mapping[str, Call]:
        """What this module's calls at seams of the plan compute, by the seam's name: {"attention": AttentionCall(...)}.

        It counts for the `module` of this very class: a class that names another module says it anew, perhaps by
        `return super().seams()`, or else what its module computes there is unknown (`gangline.model.seams`).
        """
        return {}

    def decodes(self) -> Decoding | None:
        """How this module, children left out, takes one more token of a text. Of this very class's, as `seams` is.

        tokenwise  what it gives for a token depends on that token alone, and on what the batch says of it
        cached     it keeps what it needs of earlier tokens in `Batch.cache` (`gangline.model.cache`)
        None       it does not say, and all tokens of the text are computed again for each that is written
        """
        return None

    def emits_loss(self) -> bool:
        """Whether this module, children left out, adds terms to the objective (`forward_context.emit_loss`)."""
        return False

    def ties(self) -> dict[str, str]:
        """Parameters in this module that are another one: alias, from here -> the full name it is kept under."""
        return {}


@dataclass(frozen=True, kw_only=True)
class WrapNode(Node):
    """A node around `inner` that has the same path: an adapter around a linear. What is inside keeps its names.

    `module` names a class that is put in front of the class of what it wraps (`gangline.model.build.Wrapper`). Its own
    child nodes lie beside those of `inner`: `wq.lora_a` beside `wq.weight`.
    """

    inner: Node


def children(node: Node) -> Iterator[tuple[str, Node]]:
    """The nodes directly below, by their path from `node`: "attention", "blocks.0"; "" for what a node wraps."""
    found = node.__dict__.get("_children")
    if found is None:  # nodes do not change, and closed forms ask for these thousands of times
        found = tuple(_children(node))
        object.__setattr__(node, "_children", found)
    return iter(found)


def _children(node: Node) -> Iterator[tuple[str, Node]]:
    for item in fields(node):
        value = getattr(node, item.name)
        if isinstance(node, WrapNode) and item.name == "inner":
            yield "", value
        elif isinstance(value, Node):
            yield item.name, value
        elif isinstance(value, tuple):
            for index, element in enumerate(value):
                if isinstance(element, Node):
                    yield f"{item.name}.{index}", element


def nodes(tree: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Every node with its path, parents first; the root's path is "". A wrapper comes before what it wraps."""
    yield path, tree
    for name, child in children(tree):
        yield from nodes(child, f"{path}.{name}" if path and name else path or name)


def by_path(tree: Node) -> dict[str, Node]:
    """Path -> node; where one wraps another, the outermost."""
    found: dict[str, Node] = {}
    for path, node in nodes(tree):
        found.setdefault(path, node)
    return found


def replaced(tree: Node, path: str, new: Node) -> Node:
    """A copy of `tree` with `new` at `path`. Raises LookupError where there is no such node."""
    if not path:
        return new
    for name, child in children(tree):
        if not name:
            continue
        if path == name or path.startswith(name + "."):
            grown = replaced(child, path[len(name) + 1 :], new)
            field, _, index = name.partition(".")
            if not index:
                return replace(tree, **{field: grown})
            row = getattr(tree, field)
            return replace(tree, **{field: (*row[: int(index)], grown, *row[int(index) + 1 :])})
    if isinstance(tree, WrapNode):
        return replace(tree, inner=replaced(tree.inner, path, new))
    raise LookupError(f"no node {path!r} in {type(tree).__name__}; it has {', '.join(n for n, _ in children(tree))}")


def parameter_shapes(tree: Node) -> dict[str, Shape]:
    """Global shape of every parameter of the model by its name, without building it; a tied one where it is kept."""
    tied = tree.ties()
    named = ((path and f"{path}.", node.shapes()) for path, node in nodes(tree))
    return {at + name: shape for at, own in named for name, shape in own.items() if at + name not in tied}


@dataclass(frozen=True, kw_only=True)
class NormNode(Node):
    """Root-mean-square normalisation over the last dim; `offset` is added to its weight."""

    module: ClassVar[str] = "gangline.model.norm:RMSNorm"
    dim: int
    eps: float = 1e-5
    offset: float = 0.0

    def shapes(self) -> dict[str, Shape]:
        return {"weight": (self.dim,)}

    def decodes(self) -> Decoding | None:
        return "tokenwise"


@dataclass(frozen=True, kw_only=True)
class LinearNode(Node):
    """x (..., in) -> x Wᵀ + b (..., out). Below a node that knows its sizes (`fitted`) they may be left out."""

    module: ClassVar[str] = "gangline.model.linear:Linear"
    in_features: int = 0
    out_features: int = 0
    bias: bool = False

    def shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {"weight": (self.out_features, self.in_features)}
        return shapes | ({"bias": (self.out_features,)} if self.bias else {})

    def decodes(self) -> Decoding | None:
        return "tokenwise"

    def activation_bytes(self, sizes: LocalSizes) -> int:
        """Nothing of its own: the module around it counts its input, for it knows who else reads that."""
        return 0

    def rows(self, sizes: LocalSizes) -> int:
        """How many rows it multiplies of a microbatch on one rank, those that a product that tp cuts has beside."""
        return sizes.tokens


LINEAR = LinearNode()  # of the size that the node around it says


def fitted(node: Node, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Give the plain linears below `node` their sizes: name of the field -> (in_features, out_features).

    For `__post_init__` of a node whose own fields say how wide its products are: so `replace(node, hidden=...)` changes
    them too. What an edit has put there instead of a `LinearNode` stays as it is.
    """
    for name, (in_features, out_features) in sizes.items():
        child = getattr(node, name)
        if type(child) is LinearNode:
            object.__setattr__(node, name, replace(child, in_features=in_features, out_features=out_features))
            node.__dict__.pop("_children", None)


@dataclass(frozen=True, kw_only=True)
class SinksNode(Node):
    """A number per query head, which joins the sum of its softmax (`AttentionCall`)."""

    module: ClassVar[str] = "gangline.model.attention:Sinks"
    heads: int

    def shapes(self) -> dict[str, Shape]:
        return {"weight": (self.heads,)}

    def decodes(self) -> Decoding | None:
        return "tokenwise"


@dataclass(frozen=True, kw_only=True)
class AttentionNode(Node):
    """Self-attention with grouped key and value heads; with `q_norm` and `k_norm` over each head's width.

    causal, window, scale, soft_cap and sinks are of the call at its seam, as `AttentionCall` has them.
    """

    module: ClassVar[str] = "gangline.model.attention:Attention"
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None = PLAIN_ROPE
    q_norm: NormNode | None = None
    k_norm: NormNode | None = None
    wq: Node = LINEAR
    wk: Node = LINEAR
    wv: Node = LINEAR
    wo: Node = LINEAR
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: SinksNode | None = None

    def __post_init__(self) -> None:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        fitted(self, {"wq": (self.dim, q), "wk": (self.dim, kv), "wv": (self.dim, kv), "wo": (q, self.dim)})

    def flops(self, sequence_length: int) -> int:
        """q·k and p·v with all keys of the window (PaLM counts no discount for causality)."""
        return 4 * self.heads * self.head_dim * min(sequence_length, self.window or sequence_length)

    def products(self, sizes: LocalSizes, sequence_length: int) -> tuple[Product, ...]:
        return (
            AttentionProduct(
                sequences=max(1, sizes.tokens // sequence_length),
                queries=min(sizes.tokens, sequence_length),
                keys=sequence_length,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                causal=self.causal,
                window=self.window if self.window and self.window < sequence_length else None,
            ),
        )

    @property
    def call(self) -> AttentionCall:
        """What is computed at its seam."""
        sinks = "sinks.weight" if self.sinks else None
        return AttentionCall(
            causal=self.causal, window=self.window, scale=self.scale, soft_cap=self.soft_cap, sinks=sinks
        )

    def seams(self) -> Mapping[str, Call]:
        return {"attention": self.call}

    def decodes(self) -> Decoding | None:
        return "cached" if self.causal and not self.call.beyond else None


@dataclass(frozen=True, kw_only=True)
class FeedForwardNode(Node):
    """Gated feed-forward: SwiGLU, or with another `gating` its relatives."""

    module: ClassVar[str] = "gangline.model.feed_forward:FeedForward"
    dim: int
    hidden: int
    gating: Gating = SWIGLU
    w_gate: Node = LINEAR
    w_up: Node = LINEAR
    w_down: Node = LINEAR

    def __post_init__(self) -> None:
        up, down = (self.dim, self.hidden), (self.hidden, self.dim)
        fitted(self, {"w_gate": up, "w_up": up, "w_down": down})

    def decodes(self) -> Decoding | None:
        return "tokenwise"


@dataclass(frozen=True, kw_only=True)
class BlockNode(Node):
    """Attention, then feed-forward, each normalised before and added to the residual stream."""

    module: ClassVar[str] = "gangline.model.block:Block"
    attention_norm: Node
    attention: Node
    feed_forward_norm: Node
    feed_forward: Node

    def decodes(self) -> Decoding | None:
        return "tokenwise"


@dataclass(frozen=True, kw_only=True)
class EmbeddingNode(Node):
    """A vector for each token, times `scale`."""

    module: ClassVar[str] = "gangline.model.linear:Embedding"
    vocab_size: int
    dim: int
    scale: float = 1.0

    def shapes(self) -> dict[str, Shape]:
        return {"weight": (self.vocab_size, self.dim)}

    def decodes(self) -> Decoding | None:
        return "tokenwise"

    def flops(self, sequence_length: int) -> int:
        """None: a row is looked up, nothing is multiplied."""
        return 0

    def products(self, sizes: LocalSizes, sequence_length: int) -> tuple[Product, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class HeadNode(Node):
    """The last norm, the product with the vocabulary, and the loss; `z` and `soft_cap`: of `LossCall`.

    scale: of the logits, before a soft cap; it is put on what is multiplied with the vocabulary. chunk: tokens whose
    logits the loss has at a time (`run.loss_chunk`); None: all.
    """

    module: ClassVar[str] = "gangline.model.head:Head"
    vocab_size: int
    dim: int
    norm: Node
    z: float = 0.0
    soft_cap: float | None = None
    scale: float = 1.0
    chunk: int | None = None

    @property
    def call(self) -> LossCall:
        """What is computed at its seam."""
        return LossCall(z=self.z, soft_cap=self.soft_cap)

    def seams(self) -> Mapping[str, Call]:
        return {"loss": self.call}

    def shapes(self) -> dict[str, Shape]:
        return {"weight": (self.vocab_size, self.dim)}

    def decodes(self) -> Decoding | None:
        return "tokenwise"


@dataclass(frozen=True, kw_only=True)
class DecoderNode(Node):
    """The whole model. `tied`: the head multiplies with the embedding's weight."""

    module: ClassVar[str] = "gangline.model.decoder:Decoder"
    embed: Node
    blocks: tuple[Node, ...]
    head: Node
    tied: bool = False

    def decodes(self) -> Decoding | None:
        return "tokenwise"

    def ties(self) -> dict[str, str]:
        own = {"head.weight": "embed.weight"} if self.tied else {}
        below = (found for name, child in children(self) for found in nodes(child, name))
        return own | {f"{at}.{alias}": own.get(of, of) for at, node in below for alias, of in node.ties().items()}
