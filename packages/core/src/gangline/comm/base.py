"""Communication along one mesh or fold axis: the one place where ranks exchange tensors.

What counts, records, orders or delays traffic wraps a `Comm`; nothing else calls torch.distributed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from gangline.mesh import AXES

if TYPE_CHECKING:
    import torch

    from gangline.plan import Fold

Reduction = Literal["sum", "max", "min"]
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A collective under way."""

    def wait(self) -> T_co:
        """Block until done (on a GPU: make the current stream wait); the result."""
        ...


class Comm(ABC):
    """The ranks along one axis, and what they can do together.

    Every rank of the axis makes the same calls in the same order, from the thread that runs the step. With
    `async_=True` a call gives a `Pending`; its input must stay untouched until `wait()`.
    Tensors are contiguous. "n" below is `size`.
    """

    axis: str  # "tp", "dp_replicate+dp_shard", the name of a fold, "world"
    size: int
    index: int  # of this rank along the axis
    ranks: tuple[int, ...]  # the global ranks, by index

    @abstractmethod
    def all_reduce(self, x: torch.Tensor, op: Reduction = "sum", async_: bool = False) -> torch.Tensor | Pending:
        """Reduce over the axis, in place; gives `x`."""

    @abstractmethod
    def all_gather(
        self, x: torch.Tensor, async_: bool = False, into: torch.Tensor | None = None
    ) -> torch.Tensor | Pending:
        """(s, ...) on each rank -> (n·s, ...) on all, in order of index; `into`: memory for it, which may hold `x`."""

    @abstractmethod
    def reduce_scatter(self, x: torch.Tensor, async_: bool = False) -> torch.Tensor | Pending:
        """(n·s, ...) on each rank -> this rank's (s, ...) of the sum."""

    @abstractmethod
    def all_to_all(
        self,
        x: torch.Tensor,
        in_splits: Sequence[int] | None = None,
        out_splits: Sequence[int] | None = None,
        async_: bool = False,
    ) -> torch.Tensor | Pending:
        """Rows of dim 0 for each peer in order, `in_splits[i]` to peer i, `out_splits[i]` from it; None: even."""

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """`x` of the rank with index `source`, on every rank, written into `x`; gives `x`. Any dtype."""
        return self._broadcast(x, source, background=False).wait()

    def start_broadcast(self, x: torch.Tensor, source: int) -> Pending[torch.Tensor]:
        """`broadcast`, under way."""
        return self._broadcast(x, source, background=True)

    @abstractmethod
    def _broadcast(self, x: torch.Tensor, source: int, background: bool) -> Pending[torch.Tensor]:
        """Both of the above. background: whether the caller goes on while it runs."""

    @abstractmethod
    def exchange(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        recvs: Sequence[tuple[torch.Tensor, int]],
        async_: bool = False,
    ) -> Sequence[torch.Tensor] | Pending:
        """One batch of point-to-point transfers, (tensor, peer index); receives into the given tensors and gives them.

        One batch because a bare send beside a receive deadlocks on NCCL, though not on gloo.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks of the axis are here."""


class Store(Protocol):
    """The job's key-value store, for threads, writers and checks. Values are bytes."""

    def set(self, key: str, value: str | bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...


class Comms(ABC):
    """All the axes of one rank's mesh. Groups are made when first asked for, so an unused axis costs nothing.

    Ranks may ask for them in different orders, and for different ones: asking waits for nobody.
    """

    store: Store
    rank: int  # global
    device: torch.device  # where this rank computes, and where tensors lie that the ranks exchange

    @abstractmethod
    def axis(self, *axes: str) -> Comm:
        """The ranks along one axis, or along several taken together (joint index, first axis slowest)."""

    @abstractmethod
    def fold(self, fold: Fold) -> Comm:
        """The ranks of a fold; of size 1 where the mesh lacks the axes it is made of."""

    @abstractmethod
    def fold_rest(self, fold: Fold) -> Comm:
        """What is left of the fold's axes beside it: the ranks that hold the same part of what lives on the fold."""

    @property
    def world(self) -> Comm:
        """All ranks."""
        return self.axis(*AXES)

    def close(self) -> None:
        """Leave the job; no rank may communicate after it."""
