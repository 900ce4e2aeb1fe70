"""Run several ranks on one GPU. NCCL needs one GPU per rank, so these ranks communicate through the host, over gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from gpu_places import CPU, Trainer, small, trained as trained_alone
from torch import Tensor

from gangline.comm.base import Comm, Pending, Reduction, Splits, Transfers
from gangline.comm.named import make_group
from gangline.comm.solo import Done
from gangline.comm.transport import TorchComm
from gangline.comm.wrap import Wrapped, WrappedComms
from gangline.mesh import Mesh
from gangline.plugin import registry
from gangline.train.determinism import use_deterministic_kernels
from gangline_testkit import rank


class ThroughHost(Wrapped):
    """A communicator that copies tensors to the host, lets `inner` communicate, and copies the result back."""

    def _all_reduce(self, x: Tensor, op: Reduction, background: bool) -> Pending[Tensor]:
        return Done(x.copy_(self.inner.all_reduce(x.to(CPU, copy=True), op)))

    def _all_gather(self, x: Tensor, into: Tensor | None, background: bool) -> Pending[Tensor]:
        found = self.inner.all_gather(x.to(CPU, copy=True))
        return Done(found.to(x.device) if into is None else into.copy_(found))

    def _reduce_scatter(self, x: Tensor, background: bool) -> Pending[Tensor]:
        return Done(self.inner.reduce_scatter(x.to(CPU, copy=True)).to(x.device))

    def _all_to_all(self, x: Tensor, in_splits: Splits, out_splits: Splits, background: bool) -> Pending[Tensor]:
        return Done(self.inner.all_to_all(x.to(CPU, copy=True), in_splits, out_splits).to(x.device))

    def _broadcast(self, x: Tensor, source: int, background: bool) -> Pending[Tensor]:
        return Done(x.copy_(self.inner.broadcast(x.to(CPU, copy=True), source)))

    def _exchange(self, sends: Transfers, recvs: Transfers, background: bool) -> Pending[Sequence[Tensor]]:
        landing = [(torch.empty_like(into, device=CPU), peer) for into, peer in recvs]
        came = self.inner.exchange([(x.to(CPU, copy=True), peer) for x, peer in sends], landing)
        return Done([into.copy_(there) for (into, _), there in zip(recvs, came, strict=True)])


class HostComms(WrappedComms):
    """The communicators of the pool, for ranks that compute on `device`."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        super().__init__(rank.make_comms(mesh), _through_host)
        self.device = device


def _through_host(comm: Comm) -> Comm:
    return ThroughHost(comm)


def trained(device: str, words: tuple[str, ...], axes: dict[str, int], kind: str) -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of three steps, on each rank of a pool; equal on all ranks."""
    registry.installed.cache_clear()
    here, mesh = torch.device(device), Mesh.of(axes)
    return Trainer.of(small(*words), here, mesh, HostComms(mesh, here)).run_steps(kind=kind)


def twice(device: str, words: tuple[str, ...]) -> list[tuple[list[float], list[float]]]:
    """Return the losses and gradient norms of two runs with the kernels of `run.deterministic`."""
    registry.installed.cache_clear()
    here = torch.device(device)
    use_deterministic_kernels(here)
    try:
        return [trained_alone(here, *words, kind="documents") for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)


def nccl_alone(device: str) -> str:
    """Run every collective over NCCL in a group of one rank, blocking and in the background; return their number."""
    here = torch.device(device if ":" in device else f"{device}:0")
    torch.cuda.set_device(here)
    limit = timedelta(seconds=60)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    comm = TorchComm("dp_shard", [0], 0, make_group((0,), limit, "dp_shard"))
    kinds: dict[str, Callable[..., Pending[Tensor]]] = {
        "all_reduce": lambda x, later: comm._all_reduce(x.clone(), "sum", later),
        "all_gather": lambda x, later: comm._all_gather(x, None, later),
        "reduce_scatter": comm._reduce_scatter,
        "all_to_all": lambda x, later: comm._all_to_all(x, None, None, later),
        "all_to_all, uneven": lambda x, later: comm._all_to_all(x, [len(x)], [len(x)], later),
        "broadcast": lambda x, later: comm._broadcast(x.clone(), 0, later),
    }
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
    done = 0
    for dtype in (*dtypes, torch.bool, torch.float8_e4m3fn):
        x = torch.arange(12, device=here).remainder(2 if dtype is torch.bool else 100).view(4, 3).to(dtype)
        for name, call in kinds.items():
            if dtype in (torch.bool, torch.float8_e4m3fn) and "reduce" in name:
                continue
            for later in (False, True):
                found = call(x, later).wait()
                assert torch.equal(found.view(torch.uint8), x.view(torch.uint8)), f"{name} of {dtype}"
                done += 1
    comm.barrier()
    dist.destroy_process_group()
    return f"{done} collectives of {len(dtypes) + 2} dtypes"
