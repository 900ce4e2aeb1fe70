"""Measurements of a machine: matmuls, memory, links. A rate is that of the fastest, least disturbed repetition.

All ranks of a `Comm` measure links together, with equal calls in one order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from gangline.comm.base import Comm

LARGE = {"cpu": (512, 128), "cuda": (8192, 2048)}  # rows of a square matmul, large and small
COPIED = {"cpu": 32 << 20, "cuda": 1 << 30}  # bytes that are copied in memory
SENT = {"cpu": 1 << 20, "cuda": 256 << 20}  # bytes that are sent
_TERM = 2  # largest entry of the matrices of the exact matmul


def measure_fastest(device: torch.device, work: Callable[[], object], seconds: float, least: int = 3) -> float:
    """Return the seconds of the fastest repetition of `work`, over about `seconds`, after an uncounted first one."""
    return min(measure_repetitions(device, work, seconds, least))


def measure_repetitions(
    device: torch.device, work: Callable[[], object], seconds: float, least: int = 3
) -> list[float]:
    """Return the seconds of each repetition of `work`, of at least `least`, after an uncounted first one."""
    work()
    _synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return times


def measure_matmul(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    """Return the operations per second of a square matmul."""
    a = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / measure_fastest(device, lambda: torch.mm(a, a), seconds)


def measure_memory_bandwidth(device: torch.device, seconds: float) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    return 2 * source.numel() / measure_fastest(device, lambda: into.copy_(source), seconds)


def is_matmul_exact(device: torch.device, dtype: torch.dtype, size: int = 256, seed: int = 0) -> bool:
    """Return whether a matmul of small integers is exact: sums stay below 2^24, so that float32 holds them."""
    draw = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-_TERM, _TERM + 1, (size, size), generator=draw) for _ in range(2))
    expected = (a @ b).to(torch.float32).to(dtype)
    output = torch.mm(a.to(device, dtype), b.to(device, dtype)).cpu()
    return torch.equal(output, expected)


def all_reduce(comm: Comm, device: torch.device, repetitions: int) -> float:
    """Return the bytes per second that this rank sends in a ring all-reduce: 2 (n-1)/n of the array. 0 for one rank."""
    if comm.size == 1:
        return 0.0
    x = torch.zeros(SENT[device.type] // 4, dtype=torch.float32, device=device)
    seconds = _measure_collective(comm, device, lambda: comm.all_reduce(x), repetitions)
    return 2 * (comm.size - 1) / comm.size * 4 * x.numel() / seconds


def all_to_all(comm: Comm, device: torch.device, peers: Sequence[int], repetitions: int) -> float:
    """Return the bytes per second that this rank sends evenly to `peers`; other ranks call it with their own peers.

    0 for a rank without a peer.
    """
    share = SENT[device.type] // max(1, comm.size)
    splits = [share if peer in peers else 0 for peer in range(comm.size)]
    x = torch.zeros(sum(splits), dtype=torch.uint8, device=device)
    seconds = _measure_collective(comm, device, lambda: comm.all_to_all(x, splits, splits), repetitions)
    return sum(splits) / seconds


def measure_exchange(
    comm: Comm, device: torch.device, peer: int | None, repetitions: int, size: int | None = None
) -> float:
    """Return the bytes per second to a peer, while as much comes back; 0.0 if `peer` is None: none in this round."""
    send_buffer = torch.zeros(SENT[device.type] if size is None else size, dtype=torch.uint8, device=device)
    theirs = torch.empty_like(send_buffer)
    to = [] if peer is None else [(send_buffer, peer)]
    back = [] if peer is None else [(theirs, peer)]
    seconds = _measure_collective(comm, device, lambda: comm.exchange(to, back), repetitions)
    return send_buffer.numel() / seconds if peer is not None else 0.0


def _measure_collective(comm: Comm, device: torch.device, work: Callable[[], object], repetitions: int) -> float:
    """Return the seconds of the fastest repetition, about equal on all ranks, which wait for each other."""
    work()
    times = []
    for _ in range(repetitions):
        comm.barrier()
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def plan_rounds(size: int, most: int) -> list[list[int | None]]:
    """Return the peer of each rank, by round (None: no peer).

    Up to `most` ranks, all pairs meet, each once (the circle method of tournaments). Beyond, each rank meets neighbours
    at growing distances, so that every rank has as many rounds as `most` has bits.
    """
    if size <= most:
        even = size + size % 2
        rounds = []
        for number in range(even - 1):
            circle = [0, *((number + place) % (even - 1) + 1 for place in range(even - 1))]
            peers: list[int | None] = [None] * size
            for a, b in zip(circle[: even // 2], reversed(circle[even // 2 :]), strict=True):
                if a < size and b < size:
                    peers[a], peers[b] = b, a
            rounds.append(peers)
        return rounds
    rounds, apart = [], 1
    while apart < min(size, 1 << most.bit_length()):
        rounds.append([other if (other := rank ^ apart) < size else None for rank in range(size)])
        apart *= 2
    return rounds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
