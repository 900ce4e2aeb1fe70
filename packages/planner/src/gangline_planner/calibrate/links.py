"""Measurements of collectives by size, among two ranks and among all ranks, each after a short computation.

In a step, a rank enters a collective after its own computation, and waits for ranks whose computation was interrupted.
So the time of a collective is measured as the time of computation and collective, minus that of the computation alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gangline.comm.base import Comm
from gangline.explain.explained import Operation
from gangline_planner.calibrate.clock import measure_seconds
from gangline_planner.price.transfers import count_messages

SIZES = {"cpu": (1 << 12, 1 << 18, 1 << 21), "cuda": (1 << 14, 1 << 22, 1 << 26)}  # bytes of each rank's array
COMPUTED = {"cpu": 256, "cuda": 2048}  # rows of the square matmuls before a collective
MATMULS = 3  # number of matmuls before a collective
LEAST = 0.02  # minimum time of a collective, as a share of the computation: the resolution of the measurement


@dataclass(frozen=True)
class CollectiveCall:
    """Collective among a number of ranks. bytes: bytes that each rank sends."""

    operation: Operation
    ranks: int
    bytes: float

    @property
    def rounds(self) -> int:
        """Number of consecutive messages, as a plan counts them inside a node."""
        return count_messages(self.operation, self.ranks)[0]


def measure_collectives(groups: Sequence[Comm], world: Comm, device: torch.device) -> Mapping[CollectiveCall, float]:
    """Return the seconds of each collective in `groups`; all ranks of `world` run it at once, each in its own group."""
    seconds, compute = {}, make_computation(device)
    for comm in groups:
        for size in SIZES[device.type]:
            for call, work in _make_calls(comm, size, device):
                before = measure_seconds(compute, world, device, 0.02)

                def run_both(work: Callable[[], object] = work) -> None:
                    compute()
                    work()

                seconds[call] = max(measure_seconds(run_both, world, device) - before, LEAST * before)
    return seconds


def make_computation(device: torch.device) -> Callable[[], None]:
    """Return a function that computes a few matmuls, which take about a millisecond."""
    x = torch.randn(COMPUTED[device.type], COMPUTED[device.type], device=device)

    def work() -> None:
        for _ in range(MATMULS):
            x @ x

    return work


def _make_calls(comm: Comm, size: int, device: torch.device) -> list[tuple[CollectiveCall, Callable[[], object]]]:
    n = comm.size
    numbers = size // 4 // n * n
    x, part = torch.zeros(numbers, device=device), torch.zeros(numbers // n, device=device)
    volume = 4 * numbers * (n - 1) / n
    return [
        (CollectiveCall("all_reduce", n, 2 * volume), lambda: comm.all_reduce(x)),
        (CollectiveCall("all_gather", n, volume), lambda: comm.all_gather(part)),
        (CollectiveCall("reduce_scatter", n, volume), lambda: comm.reduce_scatter(x)),
    ]


def measure_overlap(comm: Comm, device: torch.device) -> float:
    """Return how much an all-reduce and a concurrent computation overlap, from 0 to 1.

    The result is the time that overlap saves, as a share of the shorter of the two.
    """
    x, compute = torch.zeros(SIZES[device.type][-1] // 4, device=device), make_computation(device)

    def send() -> object:
        return comm.all_reduce(x)

    def run_apart() -> None:
        compute()
        send()

    def run_overlapped() -> None:
        pending = comm.start_all_reduce(x)
        compute()
        pending.wait()

    gain = measure_seconds(run_apart, comm, device) - measure_seconds(run_overlapped, comm, device)
    least = min(measure_seconds(compute, comm, device, 0.02), measure_seconds(send, comm, device))
    return min(1.0, max(0.0, gain / least))
