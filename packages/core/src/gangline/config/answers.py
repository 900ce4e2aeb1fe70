"""Data that methods of a part's configuration return: sidecars, bounds of layouts, sizes of numbers. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gangline.explain.explained import Transfer
    from gangline.explain.work import StageWork


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """A process that runs next to the ranks of each machine; its output is in logs/sidecar-<name>-<node>.log.

    `target` is called as ``target(run_dir, *args)`` in a new interpreter and runs until SIGTERM, which it also gets if
    its launcher or agent was killed. `args` must be JSON data. If a machine simulates nodes, each node has a sidecar.
    """

    name: str
    target: str  # "package.module:function"
    args: tuple = ()
    outlives: float = 10.0  # seconds from SIGTERM to SIGKILL if its launcher or agent was killed


@dataclass(frozen=True, kw_only=True)
class LayoutBounds:
    """Lower bounds on the cost of a layout, computed without its pipeline schedule and without visiting each rank.

    idle             share of the step time in which ranks wait for each other
    bytes            memory of the rank with the largest memory need, in bytes
    microbatches     number of microbatches of a step on a data-parallel rank
    stages           number of pipeline stages
    splits_backward  whether the previous stage waits only for the input gradients of a backward pass
    work             work of one microbatch, summed over one rank of each pipeline coordinate; None: unknown
    transfers        transfers of one microbatch that block its computation, over the same ranks
    beside           transfers of a step on an average rank that may overlap with computation
    """

    idle: float = 0.0
    bytes: int = 0
    microbatches: int = 1
    stages: int = 1
    splits_backward: bool = False
    work: StageWork | None = None
    transfers: tuple[Transfer, ...] = ()
    beside: tuple[Transfer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ItemSizes:
    """Bytes per number: `compute` for activations and the weights they are multiplied with, `master` for master weights
    and optimizer state, `gradient` for accumulated gradients, `wire` for gradients sent between ranks.
    """

    compute: int
    master: int
    gradient: int
    wire: int
