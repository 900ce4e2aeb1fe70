"""Fake communicators without other ranks: run any rank of any mesh in one process and count its traffic.

All other ranks are assumed to hold the data of this rank, so shapes are right, values are plausible, and tensors may be
on the meta device. So one process can measure the traffic in a mesh of 16,384 ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.comm.base import Comm, Pending, Reduction, Splits, Transfers
from gangline.comm.groups import MeshComms
from gangline.comm.solo import Done
from gangline.mesh import Mesh


@dataclass
class Traffic:
    """Numbers of calls and of bytes, each by (axis, operation). Bytes: size of this rank's input tensors."""

    calls: Counter[tuple[str, str]]
    bytes: Counter[tuple[str, str]]

    def add(self, axis: str, operation: str, *tensors: Tensor) -> None:
        self.calls[axis, operation] += 1
        self.bytes[axis, operation] += sum(x.numel() * x.element_size() for x in tensors)

    def sum_axis(self, axis: str) -> int:
        """Return the bytes along one axis, summed over all operations."""
        return sum(count for (name, _), count in self.bytes.items() if name == axis)


class FakeComm(Comm):
    """A communicator along an axis whose other ranks do not exist."""

    def __init__(self, axis: str, ranks: Sequence[int], rank: int, traffic: Traffic) -> None:
        self.axis, self.ranks, self.traffic = axis, tuple(ranks), traffic
        self.size, self.index = len(self.ranks), self.ranks.index(rank)

    def _all_reduce(self, x: Tensor, op: Reduction, background: bool) -> Pending[Tensor]:
        self.traffic.add(self.axis, "all_reduce", x)
        return Done(x.mul_(self.size) if op == "sum" else x)

    def _all_gather(self, x: Tensor, into: Tensor | None, background: bool) -> Pending[Tensor]:
        self.traffic.add(self.axis, "all_gather", x)
        out = x.repeat(self.size, *(1 for _ in x.shape[1:]))
        return Done(out if into is None else into.copy_(out))

    def _reduce_scatter(self, x: Tensor, background: bool) -> Pending[Tensor]:
        self.traffic.add(self.axis, "reduce_scatter", x)
        return Done(x.chunk(self.size)[self.index] * self.size)

    def _all_to_all(self, x: Tensor, in_splits: Splits, out_splits: Splits, background: bool) -> Pending[Tensor]:
        self.traffic.add(self.axis, "all_to_all", x)
        return Done(x.clone() if out_splits is None else x.new_zeros((sum(out_splits), *x.shape[1:])))

    def _broadcast(self, x: Tensor, source: int, background: bool) -> Pending[Tensor]:
        self.traffic.add(self.axis, "broadcast", x)
        return Done(x)

    def _exchange(self, sends: Transfers, recvs: Transfers, background: bool) -> Pending[Sequence[Tensor]]:
        self.traffic.add(self.axis, "exchange", *(x for x, _ in sends))
        return Done([into.zero_() for into, _ in recvs])

    def barrier(self) -> None:
        self.traffic.add(self.axis, "barrier")


class DictStore:
    """A key-value store in the memory of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


class FakeComms(MeshComms):
    """Fake communicators of one rank of a mesh; `traffic` counts calls and bytes along each axis."""

    def __init__(self, mesh: Mesh, rank: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__(mesh, rank)
        self.device, self.store = torch.device(device), DictStore()
        self.traffic = Traffic(Counter(), Counter())

    def connect(self, axis: str, ranks: Sequence[int]) -> Comm:
        return FakeComm(axis, ranks, self.rank, self.traffic)
