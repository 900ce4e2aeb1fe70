"""What ranks send each other: every collective of core's `Comm`, by size, along each axis of more than one rank."""

from __future__ import annotations

from math import ceil, log2

import torch

from gangline.comm import Comm
from gangline_planner.calibrate.clock import seconds
from gangline_planner.calibrate.lines import intercept_and_slope

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)  # bytes that a rank has


def collectives(comm: Comm, device: torch.device) -> dict[str, list[tuple[float, float]]]:
    """Operation -> (bytes that leave a rank, seconds)."""
    n, found = comm.size, dict[str, list[tuple[float, float]]]()
    for size in SIZES:
        numbers = size // 4 // n * n
        x, part = torch.ones(numbers, device=device), torch.ones(numbers // n, device=device)
        sent = 4 * numbers * (n - 1) / n
        for name, nbytes, work in (
            ("all_reduce", 2 * sent, lambda x=x: comm.all_reduce(x.clone())),
            ("all_gather", sent, lambda part=part: comm.all_gather(part)),
            ("reduce_scatter", sent, lambda x=x: comm.reduce_scatter(x)),
            ("all_to_all", sent, lambda x=x: comm.all_to_all(x)),
        ):
            found.setdefault(name, []).append((nbytes, seconds(work, comm, device)))
    return found


def link(measured: dict[str, list[tuple[float, float]]], ranks: int) -> dict[str, float]:
    """`bandwidth` and `latency` as `gangline_planner.price.transfers` means them: rounds by operation, bytes in all."""
    slopes, starts = [], []
    for name, points in measured.items():
        rounds = ceil(log2(ranks)) * (2 if name == "all_reduce" else 1)
        start, slope = intercept_and_slope(points)
        slopes.append(slope)
        starts.append(start / rounds)
    return {"bandwidth": len(slopes) / sum(slopes), "latency": sum(starts) / len(starts)}
