"""Measurements of matmuls, memory and links. Each rate is that of the fastest repetition, the least disturbed one.

All ranks of a `Comm` measure links together: they make the same calls in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from gangline.comm.base import Comm

LARGE = {"cpu": (512, 128), "cuda": (8192, 2048)}  # rows of the large and the small square matmul
COPIED = {"cpu": 32 << 20, "cuda": 1 << 30}  # size in bytes of the array that a memory copy reads
SENT = {"cpu": 1 << 20, "cuda": 256 << 20}  # size in bytes of the array that a collective sends
_TERM = 2  # maximum absolute value of the integers in the exact matmul


def measure_fastest(device: torch.device, work: Callable[[], object], seconds: float, least: int = 3) -> float:
    """Return the seconds of the fastest repetition of `work`, repeated for about `seconds` after one warm-up call."""
    return min(measure_repetitions(device, work, seconds, least))


def measure_repetitions(
    device: torch.device, work: Callable[[], object], seconds: float, least: int = 3
) -> list[float]:
    """Return the seconds of each repetition of `work`: at least `least` repetitions, after one warm-up call."""
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
    """Return the operations per second of a matmul of two (size, size) matrices."""
    a = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / measure_fastest(device, lambda: torch.mm(a, a), seconds)


def measure_memory_bandwidth(device: torch.device, seconds: float) -> float:
    """Return the bytes per second that a memory copy reads and writes, in sum."""
    source = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    return 2 * source.numel() / measure_fastest(device, lambda: into.copy_(source), seconds)


def is_matmul_exact(device: torch.device, dtype: torch.dtype, size: int = 256, seed: int = 0) -> bool:
    """Return whether a matmul of small integers is exact: its sums stay below 2^24, so float32 holds them."""
    draw = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-_TERM, _TERM + 1, (size, size), generator=draw) for _ in range(2))
    expected = (a @ b).to(torch.float32).to(dtype)
    output = torch.mm(a.to(device, dtype), b.to(device, dtype)).cpu()
    return torch.equal(output, expected)


def all_reduce(comm: Comm, device: torch.device, repetitions: int) -> float:
    """Return the bytes per second that this rank sends in a ring all-reduce, 2 (n-1)/n of the array; 0 for one rank."""
    if comm.size == 1:
        return 0.0
    x = torch.zeros(SENT[device.type] // 4, dtype=torch.float32, device=device)
    seconds = _measure_collective(comm, device, lambda: comm.all_reduce(x), repetitions)
    return 2 * (comm.size - 1) / comm.size * 4 * x.numel() / seconds


def all_to_all(comm: Comm, device: torch.device, peers: Sequence[int], repetitions: int) -> float:
    """Return the bytes per second that this rank sends in an all-to-all, evenly to `peers`; 0 without peers.

    All other ranks must call it too, each with its own peers.
    """
    share = SENT[device.type] // max(1, comm.size)
    splits = [share if peer in peers else 0 for peer in range(comm.size)]
    x = torch.zeros(sum(splits), dtype=torch.uint8, device=device)
    seconds = _measure_collective(comm, device, lambda: comm.all_to_all(x, splits, splits), repetitions)
    return sum(splits) / seconds


def measure_exchange(
    comm: Comm, device: torch.device, peer: int | None, repetitions: int, size: int | None = None
) -> float:
    """Return the bytes per second sent to `peer`, which sends as much back; 0.0 if `peer` is None."""
    send_buffer = torch.zeros(SENT[device.type] if size is None else size, dtype=torch.uint8, device=device)
    theirs = torch.empty_like(send_buffer)
    to = [] if peer is None else [(send_buffer, peer)]
    back = [] if peer is None else [(theirs, peer)]
    seconds = _measure_collective(comm, device, lambda: comm.exchange(to, back), repetitions)
    return send_buffer.numel() / seconds if peer is not None else 0.0


def _measure_collective(comm: Comm, device: torch.device, work: Callable[[], object], repetitions: int) -> float:
    """Return the seconds of the fastest repetition; about equal on all ranks, which wait for each other in `work`."""
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
    """Return the peer of each rank in each round, [round][rank]; None: no peer in this round.

    For up to `most` ranks, every pair of ranks has one round (the circle method of round-robin tournaments). For more,
    the peers of round r are at distance 2^r, and there are at most as many rounds as `most` has bits.
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
