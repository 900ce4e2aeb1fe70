"""Sums of the loss and of metrics that modules emit, over the microbatches of a step and the ranks.

All values are float64. Sums are reduced as one vector, and maxima as another. The layout of the vectors is a list of
keys, which is equal on all ranks. The ranks extend the list together when any rank emits a new key, so ranks need not
all emit the same keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from gangline.comm.base import Comm, Pending
from gangline.comm.objects import gather_json
from gangline.comm.ordered import sum_rows
from gangline.comm.purpose import mark_traffic
from gangline.model.forward_context import Collected

Key = tuple[str, str, str, tuple[int, ...]]  # path, name, "loss" | "sum" | "mean" | "max", shape


@dataclass
class Tallied:
    """Totals of a step, equal on all ranks except `own_loss_sum`, the loss sum of this rank."""

    loss_sum: float
    own_loss_sum: float
    metrics: dict[str, float | list[float]] = field(default_factory=dict)
    by_path: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # path -> name -> value, float64


class Tally:
    """Sums and maxima over the ranks of `comm`. groups: number of ranks whose summation order one process reproduces.

    A summed number or vector takes its own slots in the reduced vector, and one more slot for its number of emissions.
    """

    def __init__(self, comm: Comm, device: torch.device, groups: int = 1) -> None:
        self.comm, self.device, self.groups = comm, device, groups
        self.agreed: list[Key] = []

    @mark_traffic("loss")
    def begin(self, losses: Sequence[Tensor], collected: Collected) -> None:
        """Start the reduction, after all forward passes. `losses`: one 0-d loss sum for each microbatch."""
        self._values = _group_by_key(collected)
        self._count = len(losses)
        new = float(any(key not in self.agreed for key in self._values))
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        loss = self._sum_groups([x.double() for x in losses]) if losses else zero
        head, self._own = torch.stack((loss, zero + new)), loss
        self._sums = self.comm.start_all_reduce(torch.cat((head, *self._sum())))
        self._maxima = self._begin_maxima()

    @mark_traffic("loss")
    def finish(self, tokens: int, *more: Tensor) -> tuple[Tallied, list[float]]:
        """Return the totals, and the 0-d tensors `more` as numbers, with one transfer to the host."""
        sums, maxima = self._wait()
        numbers = _to_host(sums, maxima, self._own, *more)
        own, *extra = numbers[len(sums) + len(maxima) :]
        loss_sum, new = numbers[:2]
        if new:
            self._agree()
            self._sums = self.comm.start_all_reduce(torch.cat((sums[:2], *self._sum())))
            self._maxima = self._begin_maxima()
            sums, maxima = self._wait()
            numbers = _to_host(sums, maxima)
        tallied = Tallied(loss_sum, own)
        if self.agreed:
            self._read(tallied, torch.cat((sums, maxima)), numbers, len(sums), max(tokens, 1))
        return tallied, extra

    def _wait(self) -> tuple[Tensor, Tensor]:
        sums = self._sums.wait()
        return sums, sums[:0] if self._maxima is None else self._maxima.wait()

    def _sum(self) -> list[Tensor]:
        vectors = []
        for key in self.agreed:
            if key[2] == "max":
                continue
            by_microbatch = self._values.get(key, {})
            nothing = torch.zeros(prod(key[3]) + 1, dtype=torch.float64, device=self.device)
            one = torch.ones(1, dtype=torch.float64, device=self.device)
            rows = [
                torch.cat((by_microbatch[i].double().reshape(-1), one)) if i in by_microbatch else nothing
                for i in range(self._count)
            ]
            vectors.append(self._sum_groups(rows) if rows else nothing)
        return vectors

    def _begin_maxima(self) -> Pending[Tensor] | None:
        vectors = []
        for key in self.agreed:
            if key[2] == "max":
                nothing = torch.full((prod(key[3]),), -torch.inf, dtype=torch.float64, device=self.device)
                rows = [x.double().reshape(-1) for x in self._values.get(key, {}).values()]
                vectors.append(torch.stack((nothing, *rows)).amax(0))
        return self.comm.start_all_reduce(torch.cat(vectors), "max") if vectors else None

    def _sum_groups(self, rows: list[Tensor]) -> Tensor:
        """Add one row per microbatch: within each group in order, then the groups in order."""
        share = len(rows) // self.groups
        shares = [sum_rows(torch.stack(rows[i * share : (i + 1) * share])) for i in range(self.groups)]
        return sum_rows(torch.stack(shares))

    def _agree(self) -> None:
        """Set the keys to the sorted union of the keys of all ranks, which is the layout of the vectors."""
        everyone = gather_json(self.comm, sorted({*self.agreed, *self._values}))
        self.agreed = sorted({(path, name, how, tuple(shape)) for keys in everyone for path, name, how, shape in keys})

    def _read(self, into: Tallied, values: Tensor, numbers: list[float], in_maxima: int, tokens: int) -> None:
        """Split the vectors by the synchronized keys; `numbers` is the copy of `values` on the host."""
        in_sums = 2
        for path, name, how, shape in self.agreed:
            size = prod(shape)
            if how == "max":
                start, in_maxima = in_maxima, in_maxima + size
                divisor = 0.0 if -math.inf in numbers[start:in_maxima] else 1.0
            else:
                start, in_sums = in_sums, in_sums + size + 1
                count = numbers[start + size]
                divisor = {"mean": count, "loss": tokens}.get(how, 1.0) if count else 0.0
            if divisor:
                metric = [number / divisor for number in numbers[start : start + size]]
                into.metrics[f"{path}/{name}" if path else name] = metric if shape else metric[0]
                into.by_path.setdefault(path, {})[name] = values[start : start + size].view(shape) / divisor


def _to_host(*tensors: Tensor) -> list[float]:
    return torch.cat([x.double().reshape(-1) for x in tensors]).tolist()


def _group_by_key(collected: Collected) -> dict[Key, dict[int, Tensor]]:
    """Return key -> microbatch -> emitted value."""
    groups: dict[Key, dict[int, Tensor]] = {}
    for (microbatch, path, name), term in collected.losses.items():
        groups.setdefault((path, name, "loss", tuple(term.shape)), {})[microbatch] = term
    for (microbatch, path, name), (value, how) in collected.metrics.items():
        groups.setdefault((path, name, how, tuple(value.shape)), {})[microbatch] = value
    return groups
