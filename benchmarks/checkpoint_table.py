"""Measure the times of the checkpoint benchmark, and print them."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from checkpoint_ways import Way, barrier

Taken = dict[str, list[tuple[float, float]]]  # way -> (wall, CPU) seconds of each round


def cpu_seconds(helper: int | None) -> float:
    """Return the CPU seconds of this process and of a helper process."""
    seconds = time.process_time()
    if helper is not None:
        fields = Path(f"/proc/{helper}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def timed(way: Way, folder: str) -> tuple[float, float]:
    """Return (wall seconds from barrier to barrier, CPU seconds of this rank)."""
    barrier()
    wall, cpu = time.perf_counter(), cpu_seconds(getattr(way, "helper", None))
    way(folder)
    cpu = cpu_seconds(getattr(way, "helper", None)) - cpu
    barrier()
    return time.perf_counter() - wall, cpu


def rounds(ways: dict[str, Way], count: int, folder: str, after: Callable[[Way], None]) -> Taken:
    """Return the times of each way, once per round, after a warm-up round. All ranks use the same random order."""
    found: Taken = {name: [] for name in ways}
    order, names = random.Random(0), list(ways)
    for number in range(count + 1):
        order.shuffle(names)
        for name in names:
            taken = timed(ways[name], folder)
            if number:
                found[name].append(taken)
            after(ways[name])
    return found


def merged(ranks: list[Taken]) -> Taken:
    """Merge the times of all ranks: the wall seconds of the slowest rank, and the CPU seconds of all."""
    return {
        name: [
            (max(wall for wall, _ in one), sum(cpu for _, cpu in one))
            for one in zip(*(found[name] for found in ranks), strict=True)
        ]
        for name in ranks[0]
    }


def show(title: str, found: Taken, raw: str, peer: str, gib: float) -> None:
    wall = {name: statistics.median(w for w, _ in taken) for name, taken in found.items()}
    best = {name: min(w for w, _ in taken) for name, taken in found.items()}
    cpu = {name: statistics.median(c for _, c in taken) for name, taken in found.items()}
    print(f"\n{title} ({load()}; x: speed relative to {raw})")
    columns = f"{'wall s':>8} {'best s':>8} {'CPU s':>7} {'wall x':>7} {'best x':>6} {'CPU x':>6}"
    print(f"  {'':<20} {columns} {'x ' + peer:>7}")
    for name in found:
        print(
            f"  {name:<20} {wall[name]:>8.3f} {best[name]:>8.3f} {cpu[name]:>7.3f} {wall[raw] / wall[name]:>7.2f} "
            f"{best[raw] / best[name]:>6.2f} {cpu[raw] / max(cpu[name], 1e-9):>6.2f} {wall[peer] / wall[name]:>7.2f}",
            flush=True,
        )


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
