"""What a layout holds, sends and computes in a step. Torch-free data: a strategy fills it, whoever plans reads it."""

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
    """One piece of computation on one stage: F forward, B backward; I its input's half and W its weights'."""

    kind: ActionKind
    stage: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What a rank sends along some axes for one purpose, over a whole step.

    axes    of the mesh; or what a strategy calls a fold, or the ranks beside one
    ranks   how many take part in each
    each_node  how many of them share a node; 1 where none does
    each_rack, each_datacentre  the same of a rack and a datacentre; 0 where not said
    tier    the slowest links between any two of them
    calls, bytes  how often, and how much leaves a rank in all
    when    F, B: within the forward and backward passes of every microbatch; end: as the gradients of the last
            microbatch become ready; update: between the optimizer's step and the next forward pass
    waits   whether the computation behind it waits for it at once; else it has until the end of the pass it is in
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
    """A rank of one pipeline rank; those of the same differ by rounding alone.

    bytes       by kind, at the moment when most is needed
    stages      the model stages that it has, in the order of its chunks
    parameters  that it computes with, before data sharding
    updated     numbers whose optimizer state it steps
    flops       of a step, recomputation included, counted as core counts them
    turns       its actions in order; two in one turn take turns with each other
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
        """Bytes in all."""
        return sum(self.bytes.values())


@dataclass(frozen=True, kw_only=True)
class Explained:
    """A layout as numbers.

    ranks   one for each pipeline rank
    work    of each model stage, for one microbatch
    tokens  of a step, over all ranks
    state_bytes  numbers of one weight that the optimizer reads and writes, in bytes: gradient, master, moments, copy
    token_flops  operations of one training token by MFU's convention (`gangline.model.flops`)
    parameters   of the whole model
    products     the format of the blocks' products
    kernels      apart: each operator is one; fused: elementwise operators that follow each other are; vendor: attention
                 is that of the accelerator's maker, too
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
        """The pipeline rank that needs most memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].memory)

    @property
    def busiest(self) -> int:
        """The pipeline rank that sends most."""
        return max(range(len(self.ranks)), key=lambda rank: sum(sent.bytes for sent in self.ranks[rank].transfers))

    @property
    def unknown(self) -> tuple[str, ...]:
        """Paths of nodes that do not say what they multiply, or say nothing; of equal blocks the first."""
        return tuple(dict.fromkeys(path for stage in self.work for path in stage.unknown))
