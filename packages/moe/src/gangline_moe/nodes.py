"""The config nodes of a layer with experts. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gangline.model.linear_nodes import LINEAR, LinearNode, fit_linears
from gangline.model.local_sizes import CommVolume, LocalSizes
from gangline.model.products import MatrixProduct, Product
from gangline.model.tree import Decoding, Node, Shape, WrapNode
from gangline_basics.model.decoder_nodes import FeedForwardNode
from gangline_basics.model.gating import SWIGLU, Gating
from gangline_moe.config import FOLD
from gangline_moe.routers.config import Biased, ExpertChoice, Grouped, RouterConfig, Sigmoid, Softmax

INDEX = 8  # bytes of a number of a token, of an expert, or of rows
WHAT = "rows to experts and back, if balanced"


@dataclass(frozen=True, kw_only=True)
class RouterNode(Node):
    """What every router is made from. The numbers are those of `gangline_moe.routers.config.RouterConfig`."""

    dim: int
    experts: int
    top_k: int
    bias_rate: float = 0.0
    sequence_loss: float = 0.0
    step_loss: float = 0.0
    z_loss: float = 0.0
    jitter: float = 0.0
    gate: Node = LINEAR

    def __post_init__(self) -> None:
        fit_linears(self, {"gate": (self.dim, self.experts)})

    def emits_loss(self) -> bool:
        return bool(self.sequence_loss or self.step_loss or self.z_loss)

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Scores of all experts, those of the chosen and which they are; the input, where the gate reads a copy."""
        N, E, k = sizes.tokens, self.experts, self.top_k
        nbytes = N * (E + k) * sizes.master_itemsize + N * k * INDEX
        if self.z_loss:
            nbytes += N * (E + 1) * sizes.master_itemsize
        if self.jitter:
            nbytes += 2 * N * self.dim * sizes.master_itemsize
        elif self.copies(sizes):
            nbytes += N * self.dim * sizes.master_itemsize
        return nbytes

    def copies(self, sizes: LocalSizes) -> bool:
        """Whether the gate reads another tensor than the layer is given: its weights have the masters' dtype."""
        return bool(self.jitter) or sizes.master_itemsize != sizes.itemsize

    def count_division_bytes(self, sizes: LocalSizes) -> int:
        """Bytes kept to divide the chosen scores by their sum: the scores and the sums."""
        return sizes.tokens * (self.top_k + 1) * sizes.master_itemsize


@dataclass(frozen=True, kw_only=True)
class SoftmaxNode(RouterNode):
    module: ClassVar[str] = "gangline_moe.routers.softmax:SoftmaxRouter"
    renormalise: bool = True

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        return super().count_activation_bytes(sizes) + self.renormalise * self.count_division_bytes(sizes)


@dataclass(frozen=True, kw_only=True)
class SigmoidNode(RouterNode):
    module: ClassVar[str] = "gangline_moe.routers.sigmoid:SigmoidRouter"
    renormalise: bool = True
    scale: float = 1.0

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        shares = self.sequence_loss or self.step_loss  # scores as shares of 1: their sums are kept
        sums = sizes.tokens * sizes.master_itemsize if shares else 0
        return super().count_activation_bytes(sizes) + self.renormalise * self.count_division_bytes(sizes) + sums


@dataclass(frozen=True, kw_only=True)
class GroupedNode(SigmoidNode):
    module: ClassVar[str] = "gangline_moe.routers.grouped:GroupedRouter"
    groups: int
    top_groups: int

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"


@dataclass(frozen=True, kw_only=True)
class ExpertChoiceNode(RouterNode):
    module: ClassVar[str] = "gangline_moe.routers.expert_choice:ExpertChoiceRouter"


def _get_common_options(config: RouterConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("bias_rate", "sequence_loss", "step_loss", "z_loss", "jitter")}


def build_softmax(config: Softmax, *, dim: int, experts: int, top_k: int) -> RouterNode:
    """The router `softmax`."""
    return SoftmaxNode(
        dim=dim, experts=experts, top_k=top_k, renormalise=config.renormalise, **_get_common_options(config)
    )


def build_biased(config: Biased, *, dim: int, experts: int, top_k: int) -> RouterNode:
    """The router `biased`."""
    node = build_softmax(config, dim=dim, experts=experts, top_k=top_k)
    return replace(node, gate=LinearNode(in_features=dim, out_features=experts, bias=True))


def build_sigmoid(config: Sigmoid, *, dim: int, experts: int, top_k: int) -> RouterNode:
    """The router `sigmoid`."""
    return SigmoidNode(
        dim=dim,
        experts=experts,
        top_k=top_k,
        renormalise=config.renormalise,
        scale=config.scale,
        **_get_common_options(config),
    )


def build_grouped(config: Grouped, *, dim: int, experts: int, top_k: int) -> RouterNode:
    """The router `grouped`."""
    return GroupedNode(
        dim=dim,
        experts=experts,
        top_k=top_k,
        renormalise=config.renormalise,
        scale=config.scale,
        groups=config.groups,
        top_groups=config.top_groups,
        **_get_common_options(config),
    )


def build_expert_choice(config: ExpertChoice, *, dim: int, experts: int, top_k: int) -> RouterNode:
    """The router `expert_choice`."""
    return ExpertChoiceNode(dim=dim, experts=experts, top_k=top_k, **_get_common_options(config))


@dataclass(frozen=True, kw_only=True)
class StackNode(LinearNode):
    """`experts` linears in one: rows x (A, in) in runs of one expert each -> (A, out); a token is in `top_k` runs."""

    module: ClassVar[str] = "gangline_moe.experts:Stack"
    experts: int = 0
    top_k: int = 0

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def get_shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {"weight": (self.experts, self.out_features, self.in_features)}
        return shapes | ({"bias": (self.experts, self.out_features)} if self.bias else {})

    def count_flops(self, sequence_length: int) -> int:
        return 2 * self.top_k * self.out_features * self.in_features

    def list_products(self, sizes: LocalSizes, sequence_length: int) -> tuple[Product, ...]:
        """If all experts get as many rows."""
        return (
            MatrixProduct(
                rows=sizes.tokens * self.top_k,
                inner=self.in_features,
                columns=self.out_features,
                matrices=self.experts,
            ),
        )

    def count_rows(self, sizes: LocalSizes) -> int:
        """If all experts get as many."""
        return sizes.tokens * self.top_k


STACK = StackNode()  # of the size that the experts around it say


@dataclass(frozen=True, kw_only=True)
class ExpertsNode(Node):
    """`experts` gated feed-forwards of width `hidden`, stacked; a token is multiplied with `top_k` of them."""

    module: ClassVar[str] = "gangline_moe.experts:Experts"
    dim: int
    hidden: int
    experts: int
    top_k: int
    gating: Gating = SWIGLU
    w_gate: Node = STACK
    w_up: Node = STACK
    w_down: Node = STACK

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def __post_init__(self) -> None:
        up, down = (self.dim, self.hidden), (self.hidden, self.dim)
        for name, (inside, out) in {"w_gate": up, "w_up": up, "w_down": down}.items():
            if type(stack := getattr(self, name)) is StackNode:
                sized_stack = replace(
                    stack, in_features=inside, out_features=out, experts=self.experts, top_k=self.top_k
                )
                object.__setattr__(self, name, sized_stack)

    @property
    def wrapped(self) -> bool:
        """Whether an edit put something around one of the products."""
        return any(isinstance(stack, WrapNode) for stack in (self.w_gate, self.w_up, self.w_down))

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Nothing beyond what the layer states: it knows how many rows come."""
        return 0


@dataclass(frozen=True, kw_only=True)
class MoeNode(Node):
    """A layer with experts in the place of a feed-forward. `shared`: what every token goes through beside them, times
    sigmoid(`shared_gate` x) where there is one.
    """

    module: ClassVar[str] = "gangline_moe.layer:MoeLayer"
    router: RouterNode
    experts: ExpertsNode
    shared: FeedForwardNode | None = None
    shared_gate: LinearNode | None = None
    capacity_factor: float | None = None
    ranks_per_node: int | None = None

    def get_decoding(self) -> Decoding | None:
        """Over a capacity a token is dropped or not by the other tokens of its microbatch."""
        return "tokenwise" if self.capacity_factor is None else None

    def count_rows(self, sizes: LocalSizes) -> int:
        """Pairs of a token and an expert of it in a microbatch on one rank, if all experts get as many: as many leave
        a rank of the fold as come to it.
        """
        pairs, experts = sizes.tokens * self.router.top_k, self.router.experts
        if self.capacity_factor is None:
            return pairs
        return min(pairs, experts * max(1, math.ceil(self.capacity_factor * pairs / experts)))

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Each row on its way in and out and its two products before the gate (where products are wrapped, also the
        activated gate and what the last product reads); where rows and pairs lie and where each
        expert's rows begin, on a fold also of those that came; the input, where the gate multiplies it as it is and no
        shared expert counts it.
        """
        rows, dim, hidden = self.count_rows(sizes), self.experts.dim, self.experts.hidden
        inner = 2 + self.experts.wrapped * (1 + self.experts.gating.plain)
        nbytes = rows * (2 * dim + inner * hidden) * sizes.itemsize
        nbytes += (rows + sizes.tokens * self.router.top_k + self.router.experts + 1) * INDEX
        own = self.router.experts // sizes.size(FOLD)
        if sizes.size(FOLD) > 1:
            nbytes += (own + 1 + (2 * rows if own > 1 else 0)) * INDEX
        if self.shared_gate is not None:  # what the shared experts give, and its gate
            nbytes += sizes.tokens * (dim + 1) * sizes.itemsize
        if self.shared is None and not self.router.copies(sizes):
            nbytes += sizes.tokens * dim * sizes.itemsize
        return nbytes

    def list_volumes(self, sizes: LocalSizes) -> tuple[CommVolume, ...]:
        """Rows to their experts and back in the forward pass, their gradients the same ways; how many they are."""
        ranks, each = sizes.size(FOLD), self.ranks_per_node
        if ranks == 1:
            return ()
        numbers = self.count_rows(sizes) * self.experts.dim * sizes.itemsize
        counts = self.router.experts * INDEX * (ranks - 1) // ranks
        if each is None or not 1 < each < ranks:
            once = numbers * (ranks - 1) // ranks
            return (CommVolume(fold=FOLD, what=WHAT, forward=(3, 2 * once + counts), backward=(2, 2 * once)),)
        nodes = ranks // each
        inside, between = numbers * (each - 1) // each, numbers * (nodes - 1) // nodes
        counts += INDEX * ranks * (ranks - 1)
        return (
            CommVolume(
                fold=FOLD, what=f"{WHAT}: in nodes", forward=(2, 2 * inside), backward=(2, 2 * inside), among=each
            ),
            CommVolume(
                fold=FOLD, what=f"{WHAT}: between", forward=(4, 2 * between + counts), backward=(2, 2 * between)
            ),
        )
