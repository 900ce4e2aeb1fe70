"""Timing of calls while all ranks are busy; calls are repeated back to back, as in a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil

import torch

from gangline.comm.base import Comm

MOST = 1000  # maximum number of calls in one measurement


def measure_seconds(work: Callable[[], object], comm: Comm, device: torch.device, budget: float = 0.05) -> float:
    """Return the seconds of one call: mean over calls in about `budget` seconds, and over ranks, which begin together.

    If ranks share cores, a single call may get a free core; only many consecutive calls get a rank's true share.
    """
    work()
    once = max(measure_calls(work, 1, comm, device), 1e-7)
    times = broadcast_value(min(MOST, ceil(budget / once)), comm, device)
    return compute_mean(measure_calls(work, times, comm, device) / times, comm, device)


def measure_calls(work: Callable[[], object], times: int, comm: Comm, device: torch.device) -> float:
    """Return the total seconds of `times` calls on this rank, after a barrier."""
    comm.barrier()
    finish(device)
    start = time.perf_counter()
    for _ in range(times):
        work()
    finish(device)
    return time.perf_counter() - start


def measure_alone(work: Callable[[], object], comm: Comm, device: torch.device, budget: float = 0.1) -> float:
    """Return the mean seconds of one call on the first rank while the other ranks wait; equal on all ranks."""
    seconds = 0.0
    comm.barrier()
    if comm.index == 0:
        work()
        finish(device)
        start, times = time.perf_counter(), 0
        while times < 2 or time.perf_counter() - start < budget:
            work()
            finish(device)
            times += 1
        seconds = (time.perf_counter() - start) / times
    comm.barrier()
    return compute_mean(seconds, comm, device) * comm.size


def compute_mean(value: float, comm: Comm, device: torch.device) -> float:
    """Return the mean of `value` over all ranks, on all ranks."""
    if comm.size == 1:
        return value
    return float(comm.all_reduce(torch.tensor([value], dtype=torch.float64, device=device)).item()) / comm.size


def reduce_max(value: float, comm: Comm, device: torch.device) -> float:
    """Return the maximum of `value` over all ranks, on all ranks."""
    if comm.size == 1:
        return value
    return float(comm.all_reduce(torch.tensor([value], dtype=torch.float64, device=device), "max").item())


def broadcast_value(value: int, comm: Comm, device: torch.device) -> int:
    """Return the `value` of the first rank, on all ranks."""
    if comm.size == 1:
        return value
    return int(comm.broadcast(torch.tensor([value], device=device), 0).item())


def finish(device: torch.device) -> None:
    """Wait for the device to finish its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
