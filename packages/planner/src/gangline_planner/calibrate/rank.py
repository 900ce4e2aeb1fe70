"""Rank of `gangline plan calibrate`, run as `python -m gangline_planner.calibrate.rank FILE THREADS ROUNDS`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from gangline.comm.base import Comm, Comms
from gangline.comm.transport import connect
from gangline.mesh import Mesh
from gangline_planner.calibrate import kernels, links
from gangline_planner.calibrate.clock import compute_mean, measure_alone, measure_calls, measure_seconds, reduce_max
from gangline_planner.calibrate.fit import Measured, Numbers, fit_numbers, merge_rounds
from gangline_planner.calibrate.progress import RoundProgress
from gangline_planner.calibrate.small_steps import MODELS, STARTS, SmallModel, SmallStep


def main(path: str, threads: int, rounds: int) -> None:
    """Measure together with all other ranks; the first rank writes the fitted numbers to `path` as JSON."""
    world, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(threads)
    pairs = world > 2 and world % 2 == 0
    comms = connect(Mesh.of({"dp_shard": world // 2, "tp": 2} if pairs else {"dp_shard": world}), device=device)
    try:
        numbers = measure_rank(comms, device, rounds)
        if comms.rank == 0:
            Path(path).write_text(json.dumps(numbers), encoding="utf-8")
        comms.world.barrier()
    finally:
        comms.close()


def measure_rank(comms: Comms, device: torch.device, rounds: int) -> Numbers:
    """Return the measured numbers of a cluster file, by name, as medians over `rounds` rounds."""
    ready = {model: SmallStep(model, device) for model in (STARTS, *MODELS[device.type])}
    marks = (RoundProgress(f"round {number} of {rounds}", comms.rank == 0) for number in range(1, rounds + 1))
    measurement = merge_rounds([_measure_round(comms, device, ready, progress) for progress in marks])
    total = _get_memory_bytes() / comms.world.size
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    return fit_numbers(measurement, comms.world.size, device.type) | {"memory.bytes": float(total)}


def _measure_round(
    comms: Comms, device: torch.device, ready: dict[SmallModel, SmallStep], done: RoundProgress
) -> Measured:
    """Return one round of all measurements: repeating the full round spreads the effect of other load over them."""
    comm = comms.world
    largest = ready[MODELS[device.type][-1]]
    forward, backward = done("attention", kernels.measure_attention(comm, device))
    measurement = Measured(
        copied=done("memory copies", kernels.measure_copy_bandwidth(comm, device)),
        matmuls={
            dtype: done(f"matmuls in {dtype}", kernels.measure_matmuls(dtype, comm, device)) for dtype in kernels.DTYPES
        },
        forward=forward,
        backward=backward,
        steps={
            model: done(
                f"steps of model width {model.dim}, sequence length {model.sequence_length}",
                measure_seconds(ready[model].run_passes, comm, device, 0.15),
            )
            for model in MODELS[device.type]
        },
        starts=done("kernel launches", measure_seconds(ready[STARTS].run_passes, comm, device)),
        update=done("optimizer updates", measure_seconds(ready[STARTS].update, comm, device)),
    )
    if comm.size > 1:
        whole = measure_seconds(largest.run_passes, comm, device, 0.1)
        measurement.alone = done("step of one rank alone", whole / measure_alone(largest.run_passes, comm, device))
        measurement.late = done("delay of the slowest rank", _measure_delay(largest, comm, device))
        groups = [comm, comms.get_comm("tp")] if comm.size > comms.get_comm("tp").size > 1 else [comm]
        measurement.sent = done("collectives", links.measure_collectives(groups, comm, device))
        measurement.hidden = done("overlap of collectives and matmuls", links.measure_overlap(comm, device))
    return measurement


def _measure_delay(step: SmallStep, comm: Comm, device: torch.device) -> float:
    """Return how much longer a few steps take on the slowest rank than on the mean rank, as a share of the mean."""
    own = measure_calls(step.run_passes, 3, comm, device)
    average = compute_mean(own, comm, device)
    return reduce_max(own, comm, device) / average - 1


def _get_memory_bytes() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
