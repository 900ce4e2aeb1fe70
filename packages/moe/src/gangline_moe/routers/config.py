"""Options of the routers: parts of the group `moe/router`, which other packages may extend. Torch-free.

A router's `build(config, dim, experts, top_k) -> RouterNode` returns a node whose `module` names a subclass of
`gangline_moe.routers.base.Router`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gangline import Part, Problem
from gangline.config import NonNegativeFloat, PartConfig, PositiveFloat, PositiveInt, ShareBelowOne
from gangline_basics.advice import suggest_nearest

if TYPE_CHECKING:
    from gangline.config import Run

GROUP = "moe/router"


@dataclass
class RouterConfig(PartConfig):
    """Options of every router: load balancing and jitter noise; 0 turns each of them off."""

    bias_rate: NonNegativeFloat = 0.0  # update step of the load-balancing bias of each expert; 0: no bias
    seq_aux_loss: NonNegativeFloat = 0.0  # weight of the load-balancing loss per sequence; 0: off
    # weight of the load-balancing loss per global batch (Switch), with the load of the previous step; 0: off
    global_aux_loss: NonNegativeFloat = 0.0
    z_loss: NonNegativeFloat = 0.0  # weight of the router z-loss: mean squared log-sum-exp of the logits; 0: off
    jitter: ShareBelowOne = 0.0  # jitter noise: the router input is multiplied by random factors in 1 ± jitter; 0: off

    def check(self, run: Run) -> list[Problem]:
        return list(self.find_problems(run))

    def find_problems(self, run: Run) -> Iterator[Problem]:
        """Yield problems: option values that contradict each other."""
        yield from ()


@dataclass
class Softmax(RouterConfig):
    """Options of the softmax router: select the `top_k` experts of largest probability (Mixtral, Qwen3-MoE, Switch)."""

    global_aux_loss: float = 0.02
    renormalise: bool = True  # renormalisation of a token's expert weights to sum to 1 (softmax after top-k)


@dataclass
class Biased(Softmax):
    """Options of the softmax router whose gate has a trained bias (gpt-oss)."""


@dataclass
class Sigmoid(RouterConfig):
    """Options of the sigmoid router: sigmoid scores, and a load-balancing bias without gradient (DeepSeek-V3)."""

    bias_rate: float = 0.01
    seq_aux_loss: float = 0.0001
    renormalise: bool = True  # renormalisation of a token's expert weights to sum to `scale`
    scale: PositiveFloat = 1.0  # scaling factor of the expert weights


@dataclass
class Grouped(Sigmoid):
    """Options of the grouped sigmoid router: experts from the `top_groups` best groups only (DeepSeek-V3)."""

    bias_rate: float = 0.001
    scale: float = 2.5
    groups: PositiveInt = 8  # number of groups of consecutive experts
    top_groups: PositiveInt = 4  # maximum number of groups that a token's experts come from

    def find_problems(self, run: Run) -> Iterator[Problem]:
        yield from super().find_problems(run)
        options: Any = run.edits["moe"]  # the options of the edit `moe`, which contain the router
        experts, top_k = options.experts, options.top_k
        if experts % self.groups or experts // self.groups < 2:
            yield Problem(
                f"moe.router.groups={self.groups} does not divide moe.experts={experts} into groups of two or more.",
                "The score of a group is the sum of its two best scores.",
                suggest_nearest(run, ({"moe.router.groups": groups} for groups in range(experts // 2, 0, -1))),
            )
        elif self.top_groups > self.groups or top_k > self.top_groups * (experts // self.groups):
            least = -(-top_k // (experts // self.groups))
            yield Problem(
                f"moe.router.top_groups={self.top_groups} must be from {least} to {self.groups}.",
                f"moe.top_k={top_k} experts come from {self.groups} groups of {experts // self.groups} experts each.",
                suggest_nearest(run, ({"moe.router.top_groups": size} for size in range(least, self.groups + 1))),
            )


@dataclass
class ExpertChoice(RouterConfig):
    """Options of expert choice: each expert takes the share top_k / experts of a microbatch's tokens, best first."""

    def find_problems(self, run: Run) -> Iterator[Problem]:
        yield from super().find_problems(run)
        for name in ("bias_rate", "seq_aux_loss", "global_aux_loss"):
            if getattr(self, name):
                yield Problem(
                    f"moe.router.{name}={getattr(self, name)} has no effect with expert choice.",
                    "If experts choose their tokens, all experts have the same load.",
                    f"moe.router.{name}=0, or another moe/router.",
                )


NODE = "gangline_moe.nodes"
PARTS = (
    Part(
        group=GROUP,
        name="softmax",
        config=Softmax,
        build=f"{NODE}:build_softmax",
        summary="the top_k experts with the largest softmax probabilities",
        synonyms={
            "global_aux_loss": "step_loss aux_loss moe_aux_loss_coeff router_aux_loss_coef",
            "seq_aux_loss": "sequence_loss",
        },
    ),
    Part(
        group=GROUP,
        name="biased",
        config=Biased,
        build=f"{NODE}:build_biased",
        summary="like softmax, with a trained bias in the gate",
    ),
    Part(
        group=GROUP,
        name="sigmoid",
        config=Sigmoid,
        build=f"{NODE}:build_sigmoid",
        summary="the top_k experts with the largest sigmoid scores plus balancing bias",
    ),
    Part(
        group=GROUP,
        name="grouped",
        config=Grouped,
        build=f"{NODE}:build_grouped",
        summary="like sigmoid, with experts from the best groups only",
    ),
    Part(
        group=GROUP,
        name="expert_choice",
        config=ExpertChoice,
        build=f"{NODE}:build_expert_choice",
        summary="each expert takes the tokens it scores highest",
        layout_dependent="the tokens of an expert depend on the microbatch of each rank, and on later tokens of a "
        "sequence",
    ),
)
