"""Compare `checkpoint=zarr` with disk, memory and other checkpointers, all in one run, in random order.

    python benchmarks/checkpoint.py --gib 1 --rounds 5 [--phases save blocked load plan list]

save     durable saves: from staged memory, compared with a raw O_DIRECT write; complete saves, compared with torch's
         DCP, torch.save, safetensors and (if tensorstore is installed) OCDBT
blocked  time that an asynchronous save blocks a step, compared with a memcpy; slowdown of steps during the write
load     into the saved layout and into others, with and without verified checksums, compared with a raw read and DCP;
         files are in the page cache
plan     Llama 3 405B on 16,384 ranks, in one process
list     search for the latest of 1,000 checkpoints

Two ranks save a GPT with AdamW, float32, in 300 arrays. Numbers are medians over the rounds. Seconds are from barrier
to barrier; CPU seconds are of all ranks and their writer processes. The load of the machine is printed, because it
affects every number.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from checkpoint_plans import dry_run, latest_of_many, llama
from checkpoint_reads import DcpLoad, OurLoad, RawRead
from checkpoint_state import state_of
from checkpoint_table import Taken, load, merged, rounds, show
from checkpoint_ways import (
    Dcp,
    DcpAsync,
    FromStaging,
    Memcpy,
    Ocdbt,
    Ours,
    RawWrite,
    Safetensors,
    TorchSave,
    Way,
    barrier,
    has_tensorstore,
)

from gangline_testkit import rank
from gangline_testkit.pool import close_all, get_pool

WRITERS = 2
# (number of ranks, sharded dim)
LOADS = {"same layout": (2, 0), "2 to 1": (1, 0), "2 to 4": (4, 0), "rows to columns": (2, 1)}

# --- save ------------------------------------------------------------------------------------------------------------


def save_ranks(gib: float, count: int, folder: str) -> Taken:
    state = state_of(gib, rank.world, rank.index)
    ways: dict[str, Way] = {
        "raw write, O_DIRECT": RawWrite(state),
        "zarr, from staging": FromStaging(state),
        "zarr, complete": Ours(state, folder),
        "DCP": Dcp(state),
        "torch.save": TorchSave(state),
        "safetensors": Safetensors(state),
    }
    if has_tensorstore():
        ways["OCDBT"] = Ocdbt(state)

    def clear(way: Way) -> None:
        barrier()
        if rank.index == 0:
            for place in Path(folder).iterdir():
                shutil.rmtree(place) if place.is_dir() else place.unlink()
            os.sync()
        barrier()

    found = rounds(ways, count, folder, clear)
    for way in ways.values():
        if hasattr(way, "close"):
            way.close()
    return found


def save(options: argparse.Namespace, folder: str) -> None:
    found = merged(get_pool(WRITERS).run(save_ranks, options.gib, options.rounds, folder, timeout=3600))
    show("durable save", found, "raw write, O_DIRECT", "DCP", options.gib)


# --- blocked ---------------------------------------------------------------------------------------------------------


class Steps:
    """Matmuls that take as long as a short training step."""

    def __init__(self) -> None:
        self.x, self.w = torch.randn(128, 512), torch.randn(512, 512)

    def __call__(self) -> float:
        began = time.perf_counter()
        for _ in range(20):
            self.x = torch.tanh(self.x @ self.w * 0.05)
        return time.perf_counter() - began


def blocked_ranks(gib: float, count: int, folder: str) -> dict[str, list[float]]:
    state, steps = state_of(gib, rank.world, rank.index), Steps()
    ours, memcpy, theirs = Ours(state, folder), Memcpy(state), DcpAsync(state)
    names = ("memcpy", "zarr", "zarr, first", "zarr, unprepared", "DCP async", "alone", "beside", "durable")
    found: dict[str, list[float]] = {name: [] for name in names}
    barrier()
    found["zarr, unprepared"].append(ours.save().blocked_seconds)
    ours.close()
    ours = Ours(state, f"{folder}/next")
    ours.checkpointer.prepare(state.registry)  # a run does this before its first step
    while ours.checkpointer._buffers._prepared is None:
        steps()
    for number in range(count + 1):
        found["alone"].append(statistics.fmean(steps() for _ in range(20)))
        barrier()
        began = time.perf_counter()
        memcpy(folder)
        found["memcpy"].append(time.perf_counter() - began)
        steps()
        barrier()
        began = time.perf_counter()
        handle = ours.save()
        found["zarr" if number else "zarr, first"].append(handle.blocked_seconds)
        beside = []
        while not handle.settled.done():
            beside.append(steps())
        found["durable"].append(time.perf_counter() - began)
        found["beside"].append(statistics.fmean(beside))
        found["alone"].append(statistics.fmean(steps() for _ in range(20)))
        ours.forget()
        barrier()
        theirs.start(folder)
        found["DCP async"].append(theirs.blocked)
        theirs.wait()
        barrier()
    ours.close()
    return found


def blocked(options: argparse.Namespace, folder: str) -> None:
    ranks = get_pool(WRITERS).run(blocked_ranks, options.gib, options.rounds, folder, timeout=3600)
    middle = {
        name: statistics.median(max(of) for of in zip(*(found[name] for found in ranks), strict=True))
        for name in ranks[0]
    }
    print(f"\nasynchronous save ({load()})")
    for name in ("memcpy", "zarr", "zarr, first", "zarr, unprepared", "DCP async"):
        print(f"  blocked: {name:<16} {middle[name]:7.3f} s  {middle[name] / middle['memcpy']:6.2f} x memcpy")
    print(f"  durable after             {middle['durable']:7.3f} s")
    alone, beside = (statistics.median(s for found in ranks for s in found[name]) for name in ("alone", "beside"))
    print(f"  steps during the write take {beside / alone:.3f} x as long ({alone * 1e3:.1f} ms alone)")


# --- load ------------------------------------------------------------------------------------------------------------


def stored_ranks(gib: float, folder: str) -> None:
    """Write the files that the load benchmark reads."""
    state = state_of(gib, rank.world, rank.index)
    ours = Ours(state, folder)
    for way in (RawWrite(state), ours, Dcp(state)):
        way(folder)
    ours.close()


def load_ranks(gib: float, count: int, folder: str, dim: int) -> tuple[Taken, dict[str, float]]:
    """Return (times of each way, its peak memory above the memory before the load, relative to the rank's bytes)."""
    state = state_of(gib, rank.world, rank.index, dim, fill=False)
    ways: dict[str, Way] = {
        "raw read": RawRead(state, folder, WRITERS),
        "zarr, verified": OurLoad(state, folder, True),
        "zarr, not verified": OurLoad(state, folder, False),
        "DCP": DcpLoad(state, folder),
    }
    extra = {}
    for name, way in ways.items():
        state.clear()
        gc.collect()
        before = peak(reset=True)
        way(folder)
        extra[name] = (peak() - before) / state.nbytes
        if name != "raw read" and not state.right():
            raise AssertionError(f"{name} loaded wrong values")
    return rounds(ways, count, folder, lambda way: None), extra


def peak(reset: bool = False) -> int:
    """Return the peak memory of this process in bytes. reset: start a new measurement at the current memory."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def loads(options: argparse.Namespace, folder: str) -> None:
    get_pool(WRITERS).run(stored_ranks, options.gib, folder, timeout=3600)
    for title, (readers, dim) in LOADS.items():
        if options.loads and title not in options.loads:
            continue
        ranks = get_pool(readers).run(load_ranks, options.gib, options.rounds, folder, dim, timeout=3600)
        show(f"load, {title}", merged([taken for taken, _ in ranks]), "raw read", "DCP", options.gib)
        extra = {name: max(found[name] for _, found in ranks) for name in ranks[0][1]}
        print("  additional peak memory over the rank's bytes: " + ", ".join(f"{n} {x:.2f}" for n, x in extra.items()))
        close_all()


def plan(options: argparse.Namespace, folder: str) -> None:
    llama()
    dry_run()


def listed(options: argparse.Namespace, folder: str) -> None:
    latest_of_many(folder, options.checkpoints)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    phases: dict[str, Callable[[argparse.Namespace, str], None]] = {
        "save": save, "blocked": blocked, "load": loads, "plan": plan, "list": listed,
    }  # fmt: skip
    parser.add_argument("--phases", nargs="+", choices=phases, default=list(phases))
    parser.add_argument("--gib", type=float, default=1.0, help="approximate size of the state in GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", nargs="+", choices=LOADS, help="cases of the phase load")
    parser.add_argument("--checkpoints", type=int, default=1000, help="number of checkpoints in the phase list")
    parser.add_argument("--folder", help="folder on the disk to measure")
    options = parser.parse_args()
    for name in options.phases:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-") as folder:
            phases[name](options, folder)
        close_all()


if __name__ == "__main__":
    main()
