"""Explanation of a layout: memory, traffic and work of a step; strategies write it, planners read it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gangline.explain.topology import Tier, Topology
from gangline.explain.work import StageWork
from gangline.mesh import Mesh

ActionKind = Literal["F", "B", "I", "W"]
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
When = Literal["F", "B", "end", "update"]
Kernels = Literal["apart", "fused", "vendor"]


class StepAction(NamedTuple):
    """One computation on one stage: F forward; B backward, or its halves I (input gradient) and W (weight gradient)."""

    kind: ActionKind
    stage: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Traffic of a rank along some axes for one purpose, per step.

    axes    axes of the mesh; or the strategy's name of a fold, or of the ranks across folds
    ranks   number of ranks in each call
    each_node  number of these ranks per node; 1 if no two ranks share a node
    each_rack, each_datacentre  number of these ranks per rack and per datacentre; 0: unknown
    tier    slowest network tier between any two of these ranks
    calls, bytes  number of calls, and bytes sent per rank, both over all calls of the step
    when    F, B: within the forward and backward passes of every microbatch; end: when the gradients of the last
            microbatch become ready; update: between the optimizer's step and the next forward pass
    waits   whether the next computation waits for the transfer; else the transfer overlaps until the end of its pass
    """

    axes: tuple[str, ...]
    purpose: str
    operation: Operation
    ranks: int
    each_node: int
    tier: Tier
    calls: int
    bytes: int
    when: When
    waits: bool
    each_rack: int = 0
    each_datacentre: int = 0


@dataclass(frozen=True, kw_only=True)
class RankExplained:
    """Explanation of one rank per pipeline coordinate; ranks at the same pipeline coordinate differ only by rounding.

    bytes       memory in bytes by kind, at the peak of the step
    stages      model stages of the rank, in the order of its pipeline chunks
    parameters  number of parameters that the rank computes with, before data-parallel sharding
    updated     number of weights whose optimizer state the rank updates
    flops       FLOPs of a step, including recomputation, counted as in `gangline.model.flops`
    turns       actions in order; two actions in the same turn overlap
    """

    bytes: Mapping[str, int]
    transfers: tuple[Transfer, ...]
    stages: tuple[int, ...]
    blocks: int
    parameters: int
    updated: int
    flops: int
    turns: tuple[tuple[StepAction, ...], ...]

    @property
    def memory(self) -> int:
        """Peak memory in bytes, over all kinds."""
        return sum(self.bytes.values())


@dataclass(frozen=True, kw_only=True)
class Explained:
    """Explanation of a layout in numbers.

    ranks   one rank for each pipeline coordinate
    work    work of each model stage, for one microbatch
    tokens  number of tokens of a step, over all ranks
    state_bytes  bytes per weight that the optimizer reads and writes: gradient, master weight, moments, copy
    token_flops  FLOPs per training token by MFU's convention (`gangline.model.flops`)
    parameters   number of parameters of the model
    matmul_format  number format of the matmuls in blocks
    kernels      apart: one kernel per operator; fused: consecutive elementwise operators are one kernel;
                 vendor: as fused, with the attention kernel of the accelerator's vendor
    """

    mesh: Mesh
    topology: Topology
    ranks: tuple[RankExplained, ...]
    work: tuple[StageWork, ...]
    microbatches: int
    tokens: int
    state_bytes: int
    token_flops: int
    parameters: int
    matmul_format: str = "bf16"
    schedule: str = "none"
    kernels: Kernels = "fused"

    @property
    def fullest(self) -> int:
        """Pipeline rank that needs the most memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].memory)

    @property
    def busiest(self) -> int:
        """Pipeline rank that sends the most bytes."""
        return max(range(len(self.ranks)), key=lambda rank: sum(sent.bytes for sent in self.ranks[rank].transfers))

    @property
    def unknown(self) -> tuple[str, ...]:
        """Paths of nodes whose matmuls or activations are unknown; only the first of several equal blocks."""
        return tuple(dict.fromkeys(path for stage in self.work for path in stage.unknown))
