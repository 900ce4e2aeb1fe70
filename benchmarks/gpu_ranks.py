"""Several ranks on one GPU: NCCL wants a GPU for each, so what they exchange goes through the host, over gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gpu_places import CPU, Trainer, small
from torch import Tensor

from gangline import plugins
from gangline.comm.base import Comm, Pending, Reduction, Splits, Transfers
from gangline.comm.solo import Done
from gangline.comm.wrap import Wrapped, WrappedComms
from gangline.mesh import Mesh
from gangline.testing import rank


class ThroughHost(Wrapped):
    """Copies to the host, lets `inner` work there, and copies back."""

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
    """The pool's own, for ranks that compute on `device`."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        super().__init__(rank.comms(mesh), _through_host)
        self.device = device


def _through_host(comm: Comm) -> Comm:
    return ThroughHost(comm)


def trained(device: str, words: tuple[str, ...], axes: dict[str, int], kind: str) -> tuple[list[float], list[float]]:
    """On each rank of a pool: losses and gradient norms of three steps, equal on all."""
    plugins.installed.cache_clear()
    here, mesh = torch.device(device), Mesh.of(axes)
    return Trainer.of(small(*words), here, mesh, HostComms(mesh, here)).steps(kind=kind)
