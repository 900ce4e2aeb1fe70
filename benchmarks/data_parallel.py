"""Compare data parallelism with torch: `ddp`, zero=0 and 1 with DistributedDataParallel, zero=2 and 3 with FSDP2.

    python benchmarks/data_parallel.py --processes 2 4 --steps 30

Model, batches and optimizer are the same. Steps of all ways run in one process group, in random order. FSDP2
(`fully_shard` around each block and the rest of the model) keeps full weights between forward and backward for the
comparison with zero=2, and frees them for zero=3. Prints medians over the steps of the wall seconds of the slowest
rank, and the ratios of wall seconds and of the CPU seconds of all ranks.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gangline.batch import Batch
from gangline.config.defaults import build_default_run
from gangline.config.schema import ParallelConfig
from gangline.config.sections import Recompute
from gangline.mesh import Mesh
from gangline.model.compose import Composed, compose_model
from gangline.model.init import initialise, make_whole_model
from gangline.plugin.registry import build
from gangline.runtime import Job
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.model.config import DecoderConfig
from gangline_basics.parallel.config import Ddp
from gangline_basics.precision.plain import Plain
from gangline_parallel_megatron_style.config import ThreeD
from gangline_testkit import rank
from gangline_testkit.pool import close_all, get_pool

RATE, CLIP, VOCABULARY, WARM = 1e-3, 1.0, 256, 3
SIZES = {
    "2M": DecoderConfig(vocab_size=VOCABULARY, dim=192, layers=4, heads=6, ffn_dim=512),
    "6M": DecoderConfig(vocab_size=VOCABULARY, dim=256, layers=8, heads=8, ffn_dim=688),
}
STAGES: dict[str, Literal[0, 1, 2, 3]] = {"zero=0": 0, "zero=1": 1, "zero=2": 2, "zero=3": 3}
BESIDE = {"ddp": "DDP", "zero=0": "DDP", "zero=1": "DDP", "zero=2": "FSDP2 kept", "zero=3": "FSDP2"}
Step = Callable[[Batch], float]
Seconds = dict[str, list[tuple[float, float]]]


def batch_of(step: int, rows: int, length: int) -> Batch:
    """Return this rank's batch of a step."""
    generator = torch.Generator().manual_seed(step * 1000 + rank.index)
    tokens = torch.randint(0, VOCABULARY, (rows, length + 1), generator=generator)
    position = torch.arange(length).expand(rows, length)
    mask = torch.ones(rows, length, dtype=torch.bool)
    return Batch(tokens[:, :-1], tokens[:, 1:].contiguous(), mask, position, torch.arange(rows), step=step)


def options(name: str, bucket_mb: float) -> ParallelConfig:
    if name == "ddp":
        return Ddp(bucket_mb=bucket_mb)
    zero = STAGES[name]
    return ThreeD(
        tp=1, pp=1, cp=1, zero=zero, dp_shard=rank.world if zero else 1, dp_replicate=1 if zero else rank.world
    )


def ours(config: DecoderConfig, name: str, bucket_mb: float) -> Step:
    """Return a step function of gangline; its result is the mean loss of all ranks."""
    run = build_default_run(model=config, parallel=options(name, bucket_mb))
    tree, plan = compose_model(run)
    mesh = Mesh.of(run.parallel.size_axes(rank.world))
    finish = make_finish(Recompute.none, False)
    precision, comms = Plain(torch.float32, torch.float32), rank.make_comms(mesh, False)
    runtime = build(run.parallel, Job(Composed(run, tree, plan), mesh, comms, precision, finish))
    initialise(runtime.shards(), plan, 0)
    optimizer = build(run.optimizer, run, runtime)

    def step(batch: Batch) -> float:
        result = runtime.step([batch])
        runtime.clip(CLIP)
        if result.finite:
            optimizer.step(RATE)
            runtime.finish_update()
        return result.loss_sum / result.tokens

    return step


def theirs(config: DecoderConfig, wrap: Callable[[nn.Module], nn.Module]) -> Step:
    """Return a step function of a plain loop around torch's wrapper; its result is the mean loss of this rank."""
    tree, plan = compose_model(build_default_run(model=config))
    model = wrap(make_whole_model(tree, plan, seed=0))
    parameters = list(model.parameters())
    decayed, plain = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)

    def step(batch: Batch) -> float:
        loss = model(batch) / batch.targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def ddp(model: nn.Module, bucket_mb: float) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)


def fsdp2(model: nn.Module, reshard: bool) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)  # changes the model in place
    return model


def runners(config: DecoderConfig, bucket_mb: float, only: list[str]) -> dict[str, Step]:
    """Return the step functions to compare, by name."""
    made: dict[str, Callable[[], Step]] = {
        "DDP": lambda: theirs(config, lambda model: ddp(model, bucket_mb)),
        "FSDP2 kept": lambda: theirs(config, lambda model: fsdp2(model, False)),
        "FSDP2": lambda: theirs(config, lambda model: fsdp2(model, True)),
        **{name: partial(ours, config, name, bucket_mb) for name in BESIDE},
    }
    wanted = {*only, *(BESIDE[name] for name in only)}
    return {name: make() for name, make in made.items() if name in wanted}


def measure(size: str, steps: int, rows: int, length: int, bucket_mb: float, only: list[str]) -> Seconds:
    """Return (wall, CPU) seconds of each step of each way on this rank; the order is random."""
    found: dict[str, list[tuple[float, float]]] = {}
    built = list(runners(SIZES[size], bucket_mb, only).items())
    world = rank.make_comms(Mesh.of({"dp_replicate": rank.world}), False).world
    # One random order for all ranks. In a fixed order, each way would always follow the same other way.
    order = random.Random(0)
    for index in range(steps + WARM):
        batch = batch_of(index, rows, length)
        order.shuffle(built)
        for name, step in built:
            world.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step(batch)
            if index >= WARM:
                found.setdefault(name, []).append((time.perf_counter() - wall, time.process_time() - cpu))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--only", nargs="+", choices=BESIDE, default=list(BESIDE))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=4, help="sequences per step and rank")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument(
        "--bucket-mb", type=float, default=4.0, help="bucket size in MB of ddp and DistributedDataParallel"
    )
    chosen = parser.parse_args()
    columns = f"{'gangline':>9} {'torch':>9} {'wall':>6} {'CPU':>6}"
    print(f"{'size':>4} {'ranks':>5} {'':>6} {'peer':>10} {columns}   (medians, ratios)")
    for size in chosen.sizes:
        for processes in chosen.processes:
            ranks = get_pool(processes).run(
                measure, size, chosen.steps, chosen.rows, chosen.length, chosen.bucket_mb, chosen.only, timeout=1800
            )
            wall, cpu = {}, {}
            for name in ranks[0]:
                by_step = list(zip(*(found[name] for found in ranks), strict=True))
                wall[name] = statistics.median(max(w for w, _ in step) for step in by_step)
                cpu[name] = statistics.median(sum(c for _, c in step) for step in by_step)
            for name in chosen.only:
                other = BESIDE[name]
                times = f"{wall[name] * 1e3:>6.1f} ms {wall[other] * 1e3:>6.1f} ms"
                ratios = f"{wall[name] / wall[other]:>6.3f} {cpu[name] / cpu[other]:>6.3f}"
                print(f"{size:>4} {processes:>5} {name:>6} {other:>10} {times} {ratios}", flush=True)
        close_all()


if __name__ == "__main__":
    main()
