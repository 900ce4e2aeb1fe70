"""Options of the routers: parts of the group `moe/router`, which other packages may add to. Torch-free.

A router's `build(config, dim, experts, top_k) -> RouterNode` names, in its node, a module that derives from
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
    """What every router has: ways to keep the load even, each switched off by 0, and noise."""

    bias_rate: NonNegativeFloat = 0.0  # step of a bias of each expert that the choice sees, up or down by its load
    sequence_loss: NonNegativeFloat = 0.0  # weight of the load-balancing loss over each sequence
    step_loss: NonNegativeFloat = 0.0  # weight of the load-balancing loss with the last step's load, whole batch
    z_loss: NonNegativeFloat = 0.0  # weight of the mean squared log-sum-exp of the router's logits
    jitter: ShareBelowOne = 0.0  # the router sees each feature multiplied by 1 - jitter to 1 + jitter

    def check(self, run: Run) -> list[Problem]:
        return list(self.find_problems(run))

    def find_problems(self, run: Run) -> Iterator[Problem]:
        """What does not fit together."""
        yield from ()


@dataclass
class Softmax(RouterConfig):
    """Probabilities over all experts; the largest `top_k` are taken (Mixtral, Qwen3-MoE, Switch)."""

    step_loss: float = 0.02
    renormalise: bool = True  # the weights of a token's experts are made to add up to 1 (softmax after the choice)


@dataclass
class Biased(Softmax):
    """As softmax, and the gate has a bias that is trained with it (gpt-oss)."""


@dataclass
class Sigmoid(RouterConfig):
    """A score between 0 and 1 for each expert; a bias that no gradient sees evens the load (DeepSeek-V3)."""

    bias_rate: float = 0.01
    sequence_loss: float = 0.0001
    renormalise: bool = True  # the weights of a token's experts are made to add up to `scale`
    scale: PositiveFloat = 1.0  # the weights are multiplied by this


@dataclass
class Grouped(Sigmoid):
    """As sigmoid, but each token's experts come from the best `top_groups` of `groups` of neighbours (DeepSeek-V3)."""

    bias_rate: float = 0.001
    scale: float = 2.5
    groups: PositiveInt = 8  # runs of as many neighbouring experts
    top_groups: PositiveInt = 4  # of them a token's experts come from

    def find_problems(self, run: Run) -> Iterator[Problem]:
        yield from super().find_problems(run)
        options: Any = run.edits["moe"]  # whose part a router is
        experts, top_k = options.experts, options.top_k
        if experts % self.groups or experts // self.groups < 2:
            yield Problem(
                f"moe.router.groups={self.groups} does not divide moe.experts={experts} into groups of two and more.",
                "A group is as good as its two best experts.",
                suggest_nearest(run, ({"moe.router.groups": groups} for groups in range(experts // 2, 0, -1))),
            )
        elif self.top_groups > self.groups or top_k > self.top_groups * (experts // self.groups):
            least = -(-top_k // (experts // self.groups))
            yield Problem(
                f"moe.router.top_groups={self.top_groups} of {self.groups} groups leave too few experts, or too many.",
                f"moe.top_k={top_k} experts come from groups of {experts // self.groups}.",
                suggest_nearest(run, ({"moe.router.top_groups": size} for size in range(least, self.groups + 1))),
            )


@dataclass
class ExpertChoice(RouterConfig):
    """Each expert takes as many tokens as every other: top_k / experts of a microbatch's, those it scores highest."""

    def find_problems(self, run: Run) -> Iterator[Problem]:
        yield from super().find_problems(run)
        for name in ("bias_rate", "sequence_loss", "step_loss"):
            if getattr(self, name):
                yield Problem(
                    f"moe.router.{name}={getattr(self, name)} has nothing to even out.",
                    "Where experts choose, all have the same load.",
                    f"moe.router.{name}=0, or another moe/router.",
                )


NODE = "gangline_moe.nodes"
PARTS = (
    Part(
        group=GROUP,
        name="softmax",
        config=Softmax,
        build=f"{NODE}:build_softmax",
        summary="the top_k largest of a softmax over all experts",
    ),
    Part(
        group=GROUP,
        name="biased",
        config=Biased,
        build=f"{NODE}:build_biased",
        summary="as softmax, and the gate has a bias of its own",
    ),
    Part(
        group=GROUP,
        name="sigmoid",
        config=Sigmoid,
        build=f"{NODE}:build_sigmoid",
        summary="the top_k largest of sigmoid scores plus a balancing bias",
    ),
    Part(
        group=GROUP,
        name="grouped",
        config=Grouped,
        build=f"{NODE}:build_grouped",
        summary="as sigmoid, out of the best groups of experts alone",
    ),
    Part(
        group=GROUP,
        name="expert_choice",
        config=ExpertChoice,
        build=f"{NODE}:build_expert_choice",
        summary="each expert takes the tokens it scores highest",
        layout_dependent="which tokens an expert takes depends on the microbatch on a rank, and on later tokens of a "
        "sequence",
    ),
)
