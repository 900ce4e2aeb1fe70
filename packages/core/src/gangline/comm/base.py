"""Communication along one mesh axis or fold: ranks exchange tensors only through a `Comm`.

Code that counts, records, orders or delays traffic wraps a `Comm`; no other code calls torch.distributed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypeVar

from gangline.mesh import AXES

if TYPE_CHECKING:
    import torch

    from gangline.plan import Fold

Reduction = Literal["sum", "max", "min"]
Splits: TypeAlias = Sequence[int] | None  # number of rows of dim 0 to send to, or receive from, each peer
Transfers: TypeAlias = "Sequence[tuple[torch.Tensor, int]]"  # (tensor, index of the peer)
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Handle of a collective in progress."""

    def wait(self) -> T_co:
        """Wait until the collective is done (on a GPU: make the current stream wait), and return the result."""
        ...


class Comm(ABC):
    """Contract of a communicator: collectives among the ranks along one axis. In shapes, n is `size`.

    Every rank of the axis makes the same calls in the same order, from the thread that runs the step. Each collective
    has two methods. `all_reduce` returns when its result may be used. `start_all_reduce` returns a `Pending` at once;
    the input must not change until `Pending.wait` has returned. Tensors are contiguous. Reductions support the dtypes
    that both gloo and NCCL can sum: floats of 16 bits and more, int8, uint8, int32 and int64. Other collectives also
    support float8. Sums of integers wrap around; "max" and "min" may ignore nan.

    Both methods of a collective call one method such as `_all_reduce`, which each transport or wrapper implements.
    background: whether the caller continues during the collective; if not, NCCL runs on the caller's own stream.
    """

    axis: str  # "tp", "dp_replicate+dp_shard", the name of a fold, "world"
    size: int  # number of ranks along the axis
    index: int  # index of this rank along the axis
    ranks: tuple[int, ...]  # global ranks, in order of index

    def all_reduce(self, x: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        """Reduce `x` over the axis, in place, and return it."""
        return self._all_reduce(x, op, background=False).wait()

    def start_all_reduce(self, x: torch.Tensor, op: Reduction = "sum") -> Pending[torch.Tensor]:
        """Start `all_reduce`; return its handle."""
        return self._all_reduce(x, op, background=True)

    @abstractmethod
    def _all_reduce(self, x: torch.Tensor, op: Reduction, background: bool) -> Pending[torch.Tensor]:
        """Start an all-reduce, for `all_reduce` and `start_all_reduce`."""

    def all_gather(self, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Gather `x` (s, ...) of all ranks, by index, as (n·s, ...). into: memory of the result, may contain `x`."""
        return self._all_gather(x, into, background=False).wait()

    def start_all_gather(self, x: torch.Tensor, into: torch.Tensor | None = None) -> Pending[torch.Tensor]:
        """Start `all_gather`; return its handle."""
        return self._all_gather(x, into, background=True)

    @abstractmethod
    def _all_gather(self, x: torch.Tensor, into: torch.Tensor | None, background: bool) -> Pending[torch.Tensor]:
        """Start an all-gather, for `all_gather` and `start_all_gather`."""

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` (n·s, ...) over the ranks and return this rank's range (s, ...) of the sum."""
        return self._reduce_scatter(x, background=False).wait()

    def start_reduce_scatter(self, x: torch.Tensor) -> Pending[torch.Tensor]:
        """Start `reduce_scatter`; return its handle."""
        return self._reduce_scatter(x, background=True)

    @abstractmethod
    def _reduce_scatter(self, x: torch.Tensor, background: bool) -> Pending[torch.Tensor]:
        """Start a reduce-scatter, for `reduce_scatter` and `start_reduce_scatter`."""

    def all_to_all(self, x: torch.Tensor, in_splits: Splits = None, out_splits: Splits = None) -> torch.Tensor:
        """Send `in_splits[i]` rows of dim 0 to peer i and receive `out_splits[i]` from peer i; None: even splits."""
        return self._all_to_all(x, in_splits, out_splits, background=False).wait()

    def start_all_to_all(
        self, x: torch.Tensor, in_splits: Splits = None, out_splits: Splits = None
    ) -> Pending[torch.Tensor]:
        """Start `all_to_all`; return its handle."""
        return self._all_to_all(x, in_splits, out_splits, background=True)

    @abstractmethod
    def _all_to_all(
        self, x: torch.Tensor, in_splits: Splits, out_splits: Splits, background: bool
    ) -> Pending[torch.Tensor]:
        """Start an all-to-all, for `all_to_all` and `start_all_to_all`."""

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Copy `x` of the rank with index `source` into `x` of every rank, and return `x`. Any dtype."""
        return self._broadcast(x, source, background=False).wait()

    def start_broadcast(self, x: torch.Tensor, source: int) -> Pending[torch.Tensor]:
        """Start `broadcast`; return its handle."""
        return self._broadcast(x, source, background=True)

    @abstractmethod
    def _broadcast(self, x: torch.Tensor, source: int, background: bool) -> Pending[torch.Tensor]:
        """Start a broadcast, for `broadcast` and `start_broadcast`."""

    def exchange(self, sends: Transfers, recvs: Transfers) -> Sequence[torch.Tensor]:
        """Run one batch of point-to-point transfers, (tensor, peer index); return the received tensors.

        The transfers form one batch because a separate send and receive deadlock on NCCL, though not on gloo.
        """
        return self._exchange(sends, recvs, background=False).wait()

    def start_exchange(self, sends: Transfers, recvs: Transfers) -> Pending[Sequence[torch.Tensor]]:
        """Start `exchange`; return its handle."""
        return self._exchange(sends, recvs, background=True)

    @abstractmethod
    def _exchange(self, sends: Transfers, recvs: Transfers, background: bool) -> Pending[Sequence[torch.Tensor]]:
        """Start a batch of transfers, for `exchange` and `start_exchange`."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks of the axis have called `barrier`."""


class Store(Protocol):
    """Contract of the job's key-value store, for background threads, checkpointers and checks. Values are bytes."""

    def set(self, key: str, value: str | bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...


class Comms(ABC):
    """Contract of the communicators of one rank, for all axes of its mesh; each process group is created on first use.

    Ranks may use different axes, in different orders: creating a group does not wait for other ranks.
    """

    store: Store
    rank: int  # global rank
    device: torch.device  # device of this rank, and of the tensors that ranks exchange

    @abstractmethod
    def get_comm(self, *axes: str) -> Comm:
        """Return the Comm along one axis, or along several axes together (joint index, first axis slowest)."""

    @abstractmethod
    def fold(self, fold: Fold) -> Comm:
        """Return the Comm of this rank's fold; it has size 1 if the mesh lacks the fold's axes."""

    @abstractmethod
    def fold_rest(self, fold: Fold) -> Comm:
        """Return the Comm of the ranks with the same index in their folds: the replicas of this rank's shards."""

    @property
    def world(self) -> Comm:
        """Comm of all ranks."""
        return self.get_comm(*AXES)

    def close(self) -> None:
        """Leave the job; this rank must not communicate afterwards."""
