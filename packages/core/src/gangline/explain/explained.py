"""Explanation of a layout: memory, traffic and work of a step. Torch-free: a strategy fills it, a planner reads it."""

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
    """The traffic of a rank along some axes for one purpose, over one step.

    axes    axes of the mesh; or the strategy's name of a fold, or of the ranks outside of a fold
    ranks   number of ranks in each call
    each_node  how many of these ranks share a node; 1 if none do
    each_rack, each_datacentre  how many share a rack and a datacentre; 0: unknown
    tier    the slowest links between any two of these ranks
    calls, bytes  number of calls, and bytes that leave a rank, both over all calls of the step
    when    F, B: within the forward and backward passes of every microbatch; end: as the gradients of the last
            microbatch become ready; update: between the optimizer's step and the next forward pass
    waits   whether the next computation waits for it at once; else only the end of the pass it is in waits
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
    """One rank of a pipeline rank; the ranks of one pipeline rank differ by rounding alone.

    bytes       bytes of memory by kind, at the fullest moment of the step
    stages      model stages of the rank, in the order of its chunks
    parameters  number of parameters that it computes with, before data sharding
    updated     number of weights whose optimizer state it steps
    flops       operations of a step, recomputation included, counted as by `gangline.model.flops`
    turns       actions in order; two actions in one turn overlap
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
        """Bytes of memory of all kinds."""
        return sum(self.bytes.values())


@dataclass(frozen=True, kw_only=True)
class Explained:
    """Explanation of a layout in numbers.

    ranks   one rank of each pipeline rank
    work    work of each model stage, for one microbatch
    tokens  tokens of a step, over all ranks
    state_bytes  bytes of one weight that the optimizer reads and writes: gradient, master, moments, copy
    token_flops  operations of one training token by MFU's convention (`gangline.model.flops`)
    parameters   number of parameters of the model
    products     format of the matmuls of blocks
    kernels      apart: each operator is a kernel; fused: elementwise operators that follow each other are one kernel;
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
    products: str = "bf16"
    schedule: str = "none"
    kernels: Kernels = "fused"

    @property
    def fullest(self) -> int:
        """Pipeline rank that needs most memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].memory)

    @property
    def busiest(self) -> int:
        """Pipeline rank that sends most bytes."""
        return max(range(len(self.ranks)), key=lambda rank: sum(sent.bytes for sent in self.ranks[rank].transfers))

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return the paths of nodes whose matmuls or activations are unknown; of equal blocks the first."""
        return tuple(dict.fromkeys(path for stage in self.work for path in stage.unknown))
