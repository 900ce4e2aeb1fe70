"""What a part's configuration answers where it is asked for more than its options, as data. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gangline.explain.explained import Transfer
    from gangline.explain.work import StageWork


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """A process that stands beside the ranks of each machine; its output is in logs/sidecar-<name>-<node>.log.

    `target` is called as ``target(run_dir, *args)`` in a fresh interpreter and runs until SIGTERM, which it also gets
    where its owner was killed; `args` must survive JSON. Where one machine plays several nodes, each has its own.
    """

    name: str
    target: str  # "package.module:function"
    args: tuple = ()
    outlives: float = 10.0  # seconds from the SIGTERM for a killed owner to SIGKILL


@dataclass(frozen=True, kw_only=True)
class LayoutBounds:
    """Lower bounds on the cost of a layout, found without its order of actions and without looking at each rank.

    idle             share of a step in which ranks wait for each other
    bytes            memory of the rank that needs most
    stages           number of pipeline stages
    splits_backward  whether the stage before waits for a part of the backward pass only
    work             computation of one microbatch, summed over one rank of each pipeline rank; None: unknown
    transfers        transfers that `work` waits for
    beside           transfers of a step on an average rank, which computation may hide
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
    """Bytes of one number: activations and the weights they meet; master weights and optimizer state; gradients as
    they accumulate; gradients between ranks.
    """

    compute: int
    master: int
    gradient: int
    wire: int
