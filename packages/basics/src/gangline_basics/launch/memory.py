"""Check that the weights, gradients and optimizer state of a run fit into this machine's memory. Torch-free."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from math import prod
from pathlib import Path

from gangline.config.answers import ItemSizes
from gangline.config.schema import Run
from gangline.errors import Problem, UserError
from gangline.launch.detected import detect
from gangline.launch.devices import count_gpus
from gangline.mesh import Mesh
from gangline.model.compose import compose_model
from gangline.model.flops import count_parameters
from gangline.model.tree import get_parameter_shapes
from gangline.plan import Plan, is_mapped
from gangline.plugin.registry import installed
from gangline.shard import get_itemsize

GB = 1e9
STATE = ("weights", "master weights", "gradients", "optimizer state")
# device files of GPUs that `count_gpus` does not count: AMD, WSL, Jetson
OTHER_GPUS = ("/dev/kfd", "/dev/dxg", "/dev/nvmap")


def find_memory_problems(run: Run) -> list[Problem]:
    """Return a problem if all ranks of the run are CPU processes of this machine and their state exceeds its memory.

    Activations and buffers are not counted, so a run that passes may still run out of memory.
    """
    local = run.launch.here and not run.launch.shares and detect() is None
    on_cpu = run.job.device == "cpu" or not (
        count_gpus(run.job.device) or any(Path(file).exists() for file in OTHER_GPUS)
    )
    if not local or not on_cpu:
        return []
    memory, ranks = read_machine_bytes(), run.launch.count_ranks(run)
    sizes = count_one_copy(run)
    if sum(sizes.values()) * ranks <= memory:
        return []
    if sum(sizes.values()) <= memory and ranks > 1:
        sizes = state_of_all_ranks(run, ranks)
    if sum(sizes.values()) <= memory:
        return []
    model, precision, optimizer = (
        installed().find_part(part).part.name for part in (run.model, run.precision, run.optimizer)
    )
    parts = ", ".join(f"{kind} {format_gb(size / GB)}" for kind, size in sizes.items() if size)
    total = sum(sizes.values()) / GB
    what = (
        f"model={model} precision={precision} optimizer={optimizer} needs {format_gb(total)} GB of memory, "
        f"but this machine has {format_gb(memory / GB)} GB."
    )
    count = count_parameters(compose_model(run)[0]) / GB
    return [
        Problem(
            what,
            f"{count:,.3g} G parameters, {ranks} CPU process{'es' * (ranks > 1)}: {parts} GB, without activations.",
            "Choose a smaller model, such as  model=tiny, or fewer layers  (model.layers=N);\n"
            "or more machines:  launch=elastic launch.nodes=N  with a strategy that shards the model.\n"
            "To find a layout that fits on GPUs:  gangline plan search, the same arguments, and  cluster=h100_ib",
        )
    ]


def count_one_copy(run: Run) -> dict[str, int]:
    """Return the bytes of one copy of the state by kind: a lower bound on the sum over all ranks in any layout."""
    tree, plan = compose_model(run)
    width, shapes = run.precision.get_sizes(), get_parameter_shapes(tree)
    sizes = dict.fromkeys(STATE, 0)
    for name, shape in shapes.items():
        compute_bytes, master = count_weight_bytes(plan, name, width)
        sizes["weights"] += prod(shape) * compute_bytes
        sizes["master weights"] += prod(shape) * master
        if not plan.is_frozen(name):
            matrix = name.startswith(f"{plan.blocks}.") and is_mapped(name, shape)
            sizes["gradients"] += prod(shape) * width.gradient
            sizes["optimizer state"] += run.optimizer.state_bytes(shape, shape, matrix=matrix, master=width.master)
    return sizes


def count_weight_bytes(plan: Plan, name: str, width: ItemSizes) -> tuple[int, int]:
    """Return the bytes per element of a parameter's compute weight, and of its separate master weight or 0."""
    dtype = plan.get_dtype(name)
    itemsize = width.master if dtype is None else get_itemsize(dtype)
    if (dtype is not None and plan.computes_as_stored(name)) or itemsize == width.compute:
        return itemsize, 0
    return width.compute, itemsize


def state_of_all_ranks(run: Run, world: int) -> dict[str, int]:
    """Return the bytes of the state on all ranks by kind, or {} for a strategy whose `explain` reports no sizes."""
    try:
        explanation = run.parallel.explain(run, Mesh.of(run.parallel.size_axes(world)))
    except UserError:
        return {}
    if explanation is None:
        return {}
    each = world // len(explanation.ranks)
    return {kind: each * sum(rank.bytes.get(kind, 0) for rank in explanation.ranks) for kind in STATE}


def read_machine_bytes(meminfo: str = "/proc/meminfo", limit: str = "/sys/fs/cgroup/memory.max") -> int:
    """Return the memory of this machine, or of the container of this process, plus the swap space, in bytes."""
    memory, swap = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    with suppress(OSError):  # not Linux
        swap = re.search(r"^SwapTotal:\s+(\d+) kB", Path(meminfo).read_text(), re.MULTILINE)
    with suppress(OSError, ValueError):  # no cgroup v2, or "max"
        memory = min(memory, int(Path(limit).read_text()))
    return memory + (int(swap[1]) * 1024 if swap else 0)


def format_gb(number: float) -> str:
    """Return a number of gigabytes with three digits, or with all digits of its integer part: 25.3, 1,130."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
