"""`parallel=ddp` beside torch's DistributedDataParallel: the same model, batches and optimizer, step by step in turn.

    python benchmarks/ddp.py --processes 2 4 --steps 40

Prints medians over the steps of wall seconds (of the slowest rank) and of CPU seconds (all ranks together).
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace

import torch
from torch.nn.parallel import DistributedDataParallel

from gangline.batch import Batch
from gangline.config.schema import Recompute
from gangline.mesh import Mesh
from gangline.model.build import construct, materialise
from gangline.model.init import initialise
from gangline.model.plan import decoder
from gangline.model.shapes import DecoderConfig
from gangline.optimizer.adamw import build as build_adamw
from gangline.optimizer.config import Adamw
from gangline.parallel.config import Ddp
from gangline.parallel.ddp import build as build_ddp
from gangline.precision.plain import Plain
from gangline.testing import rank
from gangline.testing.pool import close_all, pool
from gangline.train.finish import finisher

RATE, CLIP, VOCABULARY = 1e-3, 1.0, 256
SIZES = {
    "2M": DecoderConfig(vocab_size=VOCABULARY, dim=192, layers=4, heads=6, hidden=512),
    "6M": DecoderConfig(vocab_size=VOCABULARY, dim=256, layers=8, heads=8, hidden=688),
}


def batch_of(step: int, rows: int, length: int) -> Batch:
    """This rank's own batch of a step."""
    generator = torch.Generator().manual_seed(step * 1000 + rank.index)
    tokens = torch.randint(0, VOCABULARY, (rows, length + 1), generator=generator)
    position = torch.arange(length).expand(rows, length)
    mask = torch.ones(rows, length, dtype=torch.bool)
    return Batch(tokens[:, :-1], tokens[:, 1:], mask, position, torch.arange(rows), step=step)


def ours(config: DecoderConfig, bucket_mb: float):
    """A step of gangline; gives the loss sum."""
    tree, plan = decoder(config)
    mesh = Mesh.of({"dp_replicate": rank.world})
    run = SimpleNamespace(seed=0, deterministic=False)
    precision, comms = Plain(torch.float32, torch.float32), rank.comms(mesh, False)
    finish = finisher(Recompute.none, False)
    runtime = build_ddp(Ddp(bucket_mb=bucket_mb), run, construct(tree), plan, mesh, comms, precision, finish)
    initialise(runtime.shards(), plan, 0)
    optimizer = build_adamw(Adamw(), run, runtime)

    def step(batch: Batch) -> float:
        result = runtime.step([batch])
        runtime.clip(CLIP)
        if result.finite:
            optimizer.step(RATE)
            runtime.applied()
        return result.loss_sum / result.tokens

    return step


def theirs(config: DecoderConfig, bucket_mb: float):
    """A step of a plain loop around DistributedDataParallel; gives this rank's mean loss, which nobody reduces."""
    tree, plan = decoder(config)
    model = materialise(construct(tree), plan)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rule = plan.init(name)
            parameter.fill_(rule.scale) if rule.distribution == "constant" else parameter.normal_(0, rule.scale)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)

    def step(batch: Batch) -> float:
        loss = wrapped(batch) / batch.targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def measure(size: str, steps: int, rows: int, length: int, bucket_mb: float) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of each step of each, on this rank; the order changes with every step."""
    runners = {"ours": ours(SIZES[size], bucket_mb), "torch": theirs(SIZES[size], bucket_mb)}
    world = rank.comms(Mesh.of({"dp_replicate": rank.world}), False).world
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for index in range(steps + 3):
        batch = batch_of(index, rows, length)
        for name in sorted(runners, reverse=bool(index % 2)):
            world.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            runners[name](batch)
            if index >= 3:
                found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=4, help="sequences a step, on each rank")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[Ddp().bucket_mb])
    chosen = parser.parse_args()
    print(f"{'size':>4} {'ranks':>5} {'bucket':>7} {'ours':>9} {'torch':>9} {'wall':>6} {'CPU':>6}   (medians, ratios)")
    for size in chosen.sizes:
        for processes in chosen.processes:
            for bucket_mb in chosen.bucket_mb:
                ranks = pool(processes).run(
                    measure, size, chosen.steps, chosen.rows, chosen.length, bucket_mb, timeout=1800
                )
                wall, cpu = {}, {}
                for name in ("ours", "torch"):
                    by_step = list(zip(*(found[name] for found in ranks), strict=True))
                    wall[name] = statistics.median(max(w for w, _ in step) for step in by_step)
                    cpu[name] = statistics.median(sum(c for _, c in step) for step in by_step)
                ratios = f"{wall['ours'] / wall['torch']:>6.3f} {cpu['ours'] / cpu['torch']:>6.3f}"
                times = f"{wall['ours'] * 1e3:>6.1f} ms {wall['torch'] * 1e3:>6.1f} ms"
                print(f"{size:>4} {processes:>5} {bucket_mb:>7g} {times} {ratios}", flush=True)
        close_all()


if __name__ == "__main__":
    main()
