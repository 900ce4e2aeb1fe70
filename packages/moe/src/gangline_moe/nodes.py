"""Config nodes of an MoE layer: router, experts, layer. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gangline.model.linear_nodes import LINEAR, LinearNode, fit_linears
from gangline.model.local_sizes import CommVolume, LocalSizes
from gangline.model.matmuls import AnyMatmul, Matmul
from gangline.model.tree import Decoding, Node, Shape, WrapNode
from gangline_basics.model.decoder_nodes import FeedForwardNode
from gangline_basics.model.gating import SWIGLU, Gating
from gangline_moe.config import FOLD
from gangline_moe.routers.config import Biased, ExpertChoice, Grouped, RouterConfig, Sigmoid, Softmax

INDEX = 8  # bytes of an index of a token, of an expert, or of rows
WHAT = "rows to experts and back (even load)"


@dataclass(frozen=True, kw_only=True)
class RouterNode(Node):
    """Base config node of all routers. Loss weights and rates: see `gangline_moe.routers.config.RouterConfig`."""

    dim: int
    experts: int
    top_k: int
    bias_rate: float = 0.0
    seq_aux_loss: float = 0.0
    global_aux_loss: float = 0.0
    z_loss: float = 0.0
    jitter: float = 0.0
    gate: Node = LINEAR

    def __post_init__(self) -> None:
        fit_linears(self, {"gate": (self.dim, self.experts)})

    def emits_loss(self) -> bool:
        return bool(self.seq_aux_loss or self.global_aux_loss or self.z_loss)

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return the bytes of saved activations: all scores, chosen scores and indices, the gate's input if copied."""
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
        """Return whether the gate reads a copy of the layer's input: with jitter, or if the master dtype differs."""
        return bool(self.jitter) or sizes.master_itemsize != sizes.itemsize

    def count_division_bytes(self, sizes: LocalSizes) -> int:
        """Return the bytes saved for the division of chosen scores by their sum: the scores and the sums."""
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
        # these losses normalise the router scores; autograd saves each token's sum
        shares = self.seq_aux_loss or self.global_aux_loss
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
    return {
        name: getattr(config, name) for name in ("bias_rate", "seq_aux_loss", "global_aux_loss", "z_loss", "jitter")
    }


def build_softmax(config: Softmax, *, dim: int, experts: int, top_k: int) -> RouterNode:
    """Build the config node of the router `softmax`."""
    return SoftmaxNode(
        dim=dim, experts=experts, top_k=top_k, renormalise=config.renormalise, **_get_common_options(config)
    )


def build_biased(config: Biased, *, dim: int, experts: int, top_k: int) -> RouterNode:
    """Build the config node of the router `biased`."""
    node = build_softmax(config, dim=dim, experts=experts, top_k=top_k)
    return replace(node, gate=LinearNode(in_features=dim, out_features=experts, bias=True))


def build_sigmoid(config: Sigmoid, *, dim: int, experts: int, top_k: int) -> RouterNode:
    """Build the config node of the router `sigmoid`."""
    return SigmoidNode(
        dim=dim,
        experts=experts,
        top_k=top_k,
        renormalise=config.renormalise,
        scale=config.scale,
        **_get_common_options(config),
    )


def build_grouped(config: Grouped, *, dim: int, experts: int, top_k: int) -> RouterNode:
    """Build the config node of the router `grouped`."""
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
    """Build the config node of the router `expert_choice`."""
    return ExpertChoiceNode(dim=dim, experts=experts, top_k=top_k, **_get_common_options(config))


@dataclass(frozen=True, kw_only=True)
class StackNode(LinearNode):
    """Stacked linears of `experts` experts: rows x (A, in) sorted by expert -> (A, out); a token has `top_k` rows."""

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

    def list_matmuls(self, sizes: LocalSizes, sequence_length: int) -> tuple[AnyMatmul, ...]:
        """Return the grouped matmul, assuming equally many rows per expert."""
        return (
            Matmul(
                rows=sizes.tokens * self.top_k,
                inner=self.in_features,
                columns=self.out_features,
                matrices=self.experts,
            ),
        )

    def count_rows(self, sizes: LocalSizes) -> int:
        """Return the number of rows of a microbatch, assuming balanced load."""
        return sizes.tokens * self.top_k


STACK = StackNode()  # its sizes come from the enclosing ExpertsNode


@dataclass(frozen=True, kw_only=True)
class ExpertsNode(Node):
    """Config node of `experts` stacked gated feed-forwards of width `ffn_dim`, `top_k` per token."""

    module: ClassVar[str] = "gangline_moe.experts:Experts"
    dim: int
    ffn_dim: int
    experts: int
    top_k: int
    gating: Gating = SWIGLU
    w_gate: Node = STACK
    w_up: Node = STACK
    w_down: Node = STACK

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def __post_init__(self) -> None:
        up, down = (self.dim, self.ffn_dim), (self.ffn_dim, self.dim)
        for name, (inside, out) in {"w_gate": up, "w_up": up, "w_down": down}.items():
            if type(stack := getattr(self, name)) is StackNode:
                sized_stack = replace(
                    stack, in_features=inside, out_features=out, experts=self.experts, top_k=self.top_k
                )
                object.__setattr__(self, name, sized_stack)

    @property
    def wrapped(self) -> bool:
        """True if an edit wraps some of the stacked weights."""
        return any(isinstance(stack, WrapNode) for stack in (self.w_gate, self.w_up, self.w_down))

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return 0: `MoeNode` counts these activations, since it knows the number of rows."""
        return 0


@dataclass(frozen=True, kw_only=True)
class MoeNode(Node):
    """Config node of an MoE layer, which replaces a feed-forward.

    shared       shared experts, applied to every token in addition to its routed experts
    shared_gate  gate of the shared experts: their output is multiplied by sigmoid(`shared_gate` x); None: no gate
    """

    module: ClassVar[str] = "gangline_moe.layer:MoeLayer"
    router: RouterNode
    experts: ExpertsNode
    shared: FeedForwardNode | None = None
    shared_gate: LinearNode | None = None
    capacity_factor: float | None = None
    ranks_per_node: int | None = None

    def get_decoding(self) -> Decoding | None:
        """Return "tokenwise"; None with a capacity, as drops depend on other tokens of the microbatch."""
        return "tokenwise" if self.capacity_factor is None else None

    def count_rows(self, sizes: LocalSizes) -> int:
        """Return the number of (token, expert) pairs of a microbatch on one rank, assuming balanced load.

        As many rows leave an expert-parallel rank as arrive on it.
        """
        pairs = sizes.tokens * self.router.top_k
        capacity = self.compute_capacity(pairs)
        return pairs if capacity is None else min(pairs, self.router.experts * capacity)

    def compute_capacity(self, pairs: int) -> int | None:
        """Return the maximum number of (token, expert) pairs that an expert takes, out of `pairs`; None: no limit."""
        if self.capacity_factor is None:
            return None
        return max(1, math.ceil(self.capacity_factor * pairs / self.router.experts))

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return the bytes of the saved activations.

        Each row saves its input, its output and the results of the two matmuls before the gate. If an edit wraps the
        stacked weights, it also saves the activated gate and the input of the last matmul. The layer saves the indices
        of rows and pairs and the experts' bounds (with expert parallelism also those of arrived rows), and the output
        and gate of gated shared experts. It saves its input if the router's gate reads it without a copy and no shared
        expert counts it.
        """
        rows, dim, hidden = self.count_rows(sizes), self.experts.dim, self.experts.ffn_dim
        inner = 2 + self.experts.wrapped * (1 + self.experts.gating.plain)
        nbytes = rows * (2 * dim + inner * hidden) * sizes.itemsize
        nbytes += (rows + sizes.tokens * self.router.top_k + self.router.experts + 1) * INDEX
        own = self.router.experts // sizes.size(FOLD)
        if sizes.size(FOLD) > 1:
            nbytes += (own + 1 + (2 * rows if own > 1 else 0)) * INDEX
        if self.shared_gate is not None:  # the output of the shared experts, and their gate
            nbytes += sizes.tokens * (dim + 1) * sizes.itemsize
        if self.shared is None and not self.router.copies(sizes):
            nbytes += sizes.tokens * dim * sizes.itemsize
        return nbytes

    def list_volumes(self, sizes: LocalSizes) -> tuple[CommVolume, ...]:
        """Return the all-to-all volumes: rows to experts and back, gradients of both, and row counts."""
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
                fold=FOLD, what=f"{WHAT}: inside nodes", forward=(2, 2 * inside), backward=(2, 2 * inside), among=each
            ),
            CommVolume(
                fold=FOLD, what=f"{WHAT}: between nodes", forward=(4, 2 * between + counts), backward=(2, 2 * between)
            ),
        )
