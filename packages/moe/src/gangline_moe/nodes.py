"""The config nodes of a layer with experts. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gangline.model.tree import FeedForwardNode, Node, Shape
from gangline_moe.routers.config import ExpertChoice, Grouped, RouterConfig, Sigmoid, Softmax


@dataclass(frozen=True, kw_only=True)
class RouterNode(Node):
    """What every router is told. Numbers as in `gangline_moe.routers.config.RouterConfig`."""

    dim: int
    experts: int
    top_k: int
    bias_rate: float = 0.0
    sequence_loss: float = 0.0
    step_loss: float = 0.0
    z_loss: float = 0.0
    jitter: float = 0.0

    def shapes(self) -> dict[str, Shape]:
        return {"gate.weight": (self.experts, self.dim)}


@dataclass(frozen=True, kw_only=True)
class SoftmaxNode(RouterNode):
    module: ClassVar[str] = "gangline_moe.routers.softmax:SoftmaxRouter"
    renormalise: bool = True


@dataclass(frozen=True, kw_only=True)
class SigmoidNode(RouterNode):
    module: ClassVar[str] = "gangline_moe.routers.sigmoid:SigmoidRouter"
    renormalise: bool = True
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GroupedNode(SigmoidNode):
    module: ClassVar[str] = "gangline_moe.routers.grouped:GroupedRouter"
    groups: int
    top_groups: int


@dataclass(frozen=True, kw_only=True)
class ExpertChoiceNode(RouterNode):
    module: ClassVar[str] = "gangline_moe.routers.expert_choice:ExpertChoiceRouter"


def _common(config: RouterConfig) -> dict[str, float]:
    return {name: getattr(config, name) for name in ("bias_rate", "sequence_loss", "step_loss", "z_loss", "jitter")}


def softmax(config: Softmax, *, dim: int, experts: int, top_k: int) -> RouterNode:
    """The router `softmax`."""
    return SoftmaxNode(dim=dim, experts=experts, top_k=top_k, renormalise=config.renormalise, **_common(config))


def sigmoid(config: Sigmoid, *, dim: int, experts: int, top_k: int) -> RouterNode:
    """The router `sigmoid`."""
    return SigmoidNode(
        dim=dim, experts=experts, top_k=top_k, renormalise=config.renormalise, scale=config.scale, **_common(config)
    )


def grouped(config: Grouped, *, dim: int, experts: int, top_k: int) -> RouterNode:
    """The router `grouped`."""
    return GroupedNode(
        dim=dim,
        experts=experts,
        top_k=top_k,
        renormalise=config.renormalise,
        scale=config.scale,
        groups=config.groups,
        top_groups=config.top_groups,
        **_common(config),
    )


def expert_choice(config: ExpertChoice, *, dim: int, experts: int, top_k: int) -> RouterNode:
    """The router `expert_choice`."""
    return ExpertChoiceNode(dim=dim, experts=experts, top_k=top_k, **_common(config))


@dataclass(frozen=True, kw_only=True)
class ExpertsNode(Node):
    """`experts` gated feed-forwards of width `hidden`, stacked; a token is multiplied with `top_k` of them."""

    module: ClassVar[str] = "gangline_moe.experts:Experts"
    dim: int
    hidden: int
    experts: int
    top_k: int

    def shapes(self) -> dict[str, Shape]:
        up, down = (self.experts, self.hidden, self.dim), (self.experts, self.dim, self.hidden)
        return {"w_gate": up, "w_up": up, "w_down": down}

    def flops(self, sequence_length: int) -> int:
        return 2 * 3 * self.top_k * self.hidden * self.dim


@dataclass(frozen=True, kw_only=True)
class MoeNode(Node):
    """A layer with experts in the place of a feed-forward. `shared`: what every token goes through beside them."""

    module: ClassVar[str] = "gangline_moe.layer:MoeLayer"
    router: RouterNode
    experts: ExpertsNode
    shared: FeedForwardNode | None = None
    capacity_factor: float | None = None
    ranks_per_node: int | None = None
