"""One rank of `gangline plan calibrate`, as torchrun starts it: `python -m gangline_planner.calibrate.rank FILE`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median

import torch

from gangline.comm import Comm, connect
from gangline.strategy import Mesh
from gangline_planner.calibrate import kernels, links

ROUNDS = 3


def main(path: str) -> None:
    """Measures with all other ranks, and the first writes what it found."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    comms = connect(Mesh.of({"dp_shard": world}), device=device)
    try:
        found = measured(comms.world, device)
    finally:
        comms.close()
    if rank == 0:
        Path(path).write_text(json.dumps(found))


def measured(comm: Comm, device: torch.device) -> dict[str, float]:
    """Name of a cluster file's number -> its value, of one rank while all do the same: the middle one of some rounds,
    so that a moment in which the machine did something else counts in none.
    """
    rounds = [_round(comm, device) for _ in range(ROUNDS)]
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _memory() / comm.size
    return {name: median(one[name] for one in rounds) for name in rounds[0]} | {"memory.bytes": float(total)}


def _round(comm: Comm, device: torch.device) -> dict[str, float]:
    found = kernels.products(comm, device)
    found |= kernels.attention(comm, device, found["peak.bf16" if device.type == "cuda" else "peak.fp32"])
    found |= kernels.memory(comm, device) | kernels.launches(comm, device)
    if comm.size > 1:
        node = links.link(links.collectives(comm, device), comm.size)
        found |= {f"link.node.{name}": value for name, value in node.items()}
    return found


def _memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


if __name__ == "__main__":
    main(sys.argv[1])
