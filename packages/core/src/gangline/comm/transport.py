"""Transport of `Comm` over torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gangline.comm.base import Comm, Comms, Pending, Reduction, Splits, Store, Transfers
from gangline.comm.groups import MeshComms
from gangline.comm.job_store import open_job_store
from gangline.comm.named import make_group
from gangline.comm.ordered import Ordered, reduce_scatter_in_order
from gangline.comm.pulsed import Pulsed
from gangline.comm.solo import Solo, copy_own
from gangline.comm.wrap import WrappedComms
from gangline.mesh import Mesh
from gangline.pulse.write import Pulse
from gangline.run.generation import read_generation

# torch 2.13 renames these two and warns about the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
T = TypeVar("T")
DEFAULT = timedelta(minutes=10)  # timeout for joining the job, if the caller passes none
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Works(Generic[T]):
    """Transfers in progress, and the function that returns their result. None in `works`: a completed transfer."""

    def __init__(self, works: Sequence[dist.Work | None], result: Callable[[], T]) -> None:
        self.works, self.result = works, result

    def wait(self) -> T:
        for work in self.works:
            if work is not None:
                work.wait()
        return self.result()


def _view_as_wire(x: Tensor) -> Tensor:
    """Return `x` in the form for the network: gloo does not support float8, so float8 tensors become bytes."""
    if x.device.type == "cpu" and x.dtype.is_floating_point and x.dtype.itemsize == 1:
        return x.view(torch.uint8)
    return x


class TorchComm(Comm):
    """Comm over one torch.distributed process group."""

    def __init__(self, axis: str, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None) -> None:
        self.axis, self.ranks, self.group = axis, tuple(ranks), group
        self.size, self.index = len(self.ranks), self.ranks.index(rank)

    def _all_reduce(self, x: Tensor, op: Reduction, background: bool) -> Pending[Tensor]:
        work = dist.all_reduce(x, op=_OPS[op], group=self.group, async_op=background)
        return Works([work], lambda: x)

    def _all_gather(self, x: Tensor, into: Tensor | None, background: bool) -> Pending[Tensor]:
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:])) if into is None else into
        work = _all_gather(_view_as_wire(out), _view_as_wire(x), group=self.group, async_op=background)
        return Works([work], lambda: out)

    def _reduce_scatter(self, x: Tensor, background: bool) -> Pending[Tensor]:
        if x.device.type == "cpu":  # gloo would send the full buffer to every rank: measured 1.4 to 3 times slower
            return reduce_scatter_in_order(self, x, background)
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        work = _reduce_scatter(out, x, group=self.group, async_op=background)
        return Works([work], lambda: out)

    def _all_to_all(self, x: Tensor, in_splits: Splits, out_splits: Splits, background: bool) -> Pending[Tensor]:
        rows = x.shape[0] if out_splits is None else sum(out_splits)
        out = x.new_empty((rows, *x.shape[1:]))
        work = dist.all_to_all_single(
            _view_as_wire(out),
            _view_as_wire(x),
            None if out_splits is None else list(out_splits),
            None if in_splits is None else list(in_splits),
            group=self.group,
            async_op=background,
        )
        return Works([work], lambda: out)

    def _broadcast(self, x: Tensor, source: int, background: bool) -> Pending[Tensor]:
        # as bytes, because neither gloo nor NCCL supports every dtype that tokens are stored in
        work = dist.broadcast(x.view(-1).view(torch.uint8), self.ranks[source], group=self.group, async_op=background)
        return Works([work], lambda: x)

    def _exchange(self, sends: Transfers, recvs: Transfers, background: bool) -> Pending[Sequence[Tensor]]:
        copy_own(sends, recvs, self.index)
        batch = [
            dist.P2POp(call, x, self.ranks[peer], self.group)
            for call, transfers in ((dist.isend, sends), (dist.irecv, recvs))
            for x, peer in transfers
            if peer != self.index
        ]
        works = dist.batch_isend_irecv(batch) if batch else []
        return Works(works, lambda: [into for into, _ in recvs])

    def barrier(self) -> None:
        dist.all_reduce(torch.zeros(1), group=self.group)  # CPU tensor: the group always has gloo


class TorchComms(MeshComms):
    """Comms of torch.distributed groups, created by their members on first use; equal lists of ranks share a group.

    Ranks may request groups in any order: a request does not wait for other ranks (`gangline.comm.named`).
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        device: torch.device,
        store: dist.Store,
        *,
        timeout: timedelta | None = None,
        owns: bool = False,
    ) -> None:
        super().__init__(mesh, rank)
        self.device, self._timeout, self._owns = device, timeout, owns
        self.store: Store = store  # type: ignore[assignment]  # the stubs do not allow values of bytes
        everyone = tuple(range(mesh.world))
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {everyone: None}  # None: the default group

    def connect(self, axis: str, ranks: Sequence[int]) -> Comm:
        if len(ranks) == 1:
            return Solo(axis, self.rank)
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = make_group(key, self._timeout, axis)
        return TorchComm(axis, key, self.rank, self._groups[key])

    def close(self) -> None:
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()


def connect(
    mesh: Mesh,
    *,
    device: torch.device | str = "cpu",
    deterministic: bool = False,
    timeout: float | timedelta | None = None,
    pulse: Pulse | None = None,
) -> Comms:
    """Join the job that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torchrun sets them).

    A mesh of one rank needs no environment and no process group. If torch.distributed is already initialized, its
    default group is used, and `close()` does not destroy it.
    timeout: timeout of a collective (a number: in seconds); None: torch's default.
    deterministic: compute every sum over ranks in rank order.
    pulse: pulse that records each collective, for watchers of this rank.
    Raises ValueError if the job and the mesh have different numbers of ranks.
    """
    device = torch.device(device)
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    if mesh.world == 1:
        return TorchComms(mesh, 0, device, dist.HashStore())
    joined = dist.is_initialized()
    start = read_generation()  # prefix of keys: an agent's store outlives the ranks
    if not joined:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size != mesh.world:
            raise ValueError(f"the mesh has {mesh.world} ranks, but the job has {size} (WORLD_SIZE)")
        store: dist.Store = open_job_store(limit or DEFAULT)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"process-group/{start}", store),
            rank=int(os.environ["RANK"]),
            world_size=size,
            timeout=limit,
        )
    else:
        store = dist.distributed_c10d._get_default_store()
    comms: Comms = TorchComms(
        mesh, dist.get_rank(), device, dist.PrefixStore(f"gangline/{start}", store), timeout=limit, owns=not joined
    )
    if pulse is not None:
        comms = WrappedComms(comms, lambda comm: Pulsed(comm, pulse))
    return WrappedComms(comms, Ordered) if deterministic else comms
