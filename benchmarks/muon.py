"""Compare Muon that distributes its matrices over the ranks with Muon that repeats Newton-Schulz on every rank.

    python benchmarks/muon.py --processes 2 4 --steps 20

Both ways run in one process group, step by step in random order: with the runtime's `map_matrices`, and with a version
that gathers each matrix on every rank, which then maps it. Their results must be bitwise equal. Prints medians over the
steps of the wall seconds of `optimizer.step` on the slowest rank, and the ratios, shared to repeated, of wall seconds
and of the CPU seconds of all ranks. If ranks share a core, CPU seconds are more reliable than wall seconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gangline.config.defaults import build_default_run
from gangline.config.schema import ParallelConfig
from gangline.config.sections import Recompute
from gangline.mesh import Mesh
from gangline.model.compose import Composed, compose_model
from gangline.model.init import initialise
from gangline.plugin.registry import build
from gangline.runtime import Job, MatrixId, Runtime
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.model.config import DecoderConfig
from gangline_basics.optimizer.config import Muon
from gangline_basics.optimizer.muon import MuonOptimizer, build as build_muon
from gangline_basics.parallel.config import Ddp
from gangline_basics.precision.plain import Plain
from gangline_parallel_megatron_style.config import ThreeD
from gangline_testkit import rank
from gangline_testkit.pool import close_all, get_pool

RATE, WARM = 1e-3, 2
SIZES = {
    "2M": DecoderConfig(vocab_size=256, dim=192, layers=4, heads=6, ffn_dim=512),
    "6M": DecoderConfig(vocab_size=256, dim=256, layers=8, heads=8, ffn_dim=688),
}


def options(name: str) -> ParallelConfig:
    if name == "ddp":
        return Ddp()
    return ThreeD(tp=1, pp=1, cp=1, zero=3, dp_shard=rank.world, dp_replicate=1)


class Repeating:
    """Replacement for a runtime: every rank gathers and maps all matrices."""

    def __init__(self, runtime: Runtime, mesh: Mesh) -> None:
        self.runtime, self.comm = runtime, rank.make_comms(mesh, False).world
        self.mine = {one.name: [piece.shard.box for piece in one.pieces] for one in runtime.parameters()}

    def map_matrices(
        self, function: Callable[[Tensor, MatrixId], Tensor], inputs: Iterable[tuple[str, Sequence[Tensor]]]
    ) -> Iterator[tuple[str, Sequence[Tensor]]]:
        for name, pieces in inputs:
            whole = self.gathered(name, pieces)
            matrices = whole.view(-1, *whole.shape[-2:])
            mapped = torch.stack([function(x, MatrixId(name, i)) for i, x in enumerate(matrices)]).view_as(whole)
            yield name, [mapped[box.slices] for box in self.mine[name]]

    def gathered(self, name: str, pieces: Sequence[Tensor]) -> Tensor:
        registry, array = self.runtime.registry, f"model/{name}"
        shape = registry[array].shape
        boxes = [[box for box, _ in registry.list_rank_boxes(array, other)] for other in self.comm.ranks]
        if all([box.shape for box in held] == [shape] for held in boxes):
            return pieces[0]  # every rank has the full matrix
        longest = max(sum(box.size for box in held) for held in boxes)
        mine, whole = torch.zeros(1, longest), torch.empty(shape)
        flat = torch.cat([torch.empty(0), *(piece.reshape(-1) for piece in pieces)])
        mine[0, : flat.numel()] = flat
        for held, row in zip(boxes, self.comm.all_gather(mine), strict=True):
            sizes = [box.size for box in held]
            for box, part in zip(held, row[: sum(sizes)].split(sizes) if held else (), strict=True):
                whole[box.slices] = part.view(box.shape)
        return whole


def muon(model: DecoderConfig, name: str, repeating: bool) -> tuple[Runtime, MuonOptimizer]:
    config = Muon()
    run = build_default_run(model=model, parallel=options(name), optimizer=config)
    tree, plan = compose_model(run)
    mesh = Mesh.of(run.parallel.size_axes(rank.world))
    precision, comms = Plain(torch.float32, torch.float32), rank.make_comms(mesh, False)
    finish = make_finish(Recompute.none, False)
    runtime = build(run.parallel, Job(Composed(run, tree, plan), mesh, comms, precision, finish))
    initialise(runtime.shards(), plan, 0)
    optimizer = build_muon(config, run, runtime)
    if repeating:
        runtime.map_matrices = Repeating(runtime, mesh).map_matrices
    return runtime, optimizer


def set_gradients(runtime: Runtime, step: int) -> None:
    """Set the gradients of full arrays, equal on all ranks that hold a part of an array."""
    for number, one in enumerate(runtime.parameters()):
        whole = torch.randn(one.shape, generator=torch.Generator().manual_seed(step * 1000 + number))
        for piece in one.pieces:
            piece.tensor.grad = whole[piece.shard.box.slices].clone()


def measure(size: str, name: str, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Return (wall, CPU) seconds of each step of each way on this rank; the order is random."""
    ways = {way: muon(SIZES[size], name, way == "repeated") for way in ("shared", "repeated")}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    world = rank.make_comms(Mesh.of({"dp_replicate": rank.world}), False).world
    order = random.Random(0)  # the same order on all ranks
    for index in range(steps + WARM):
        for way in order.sample(sorted(ways), len(ways)):
            runtime, optimizer = ways[way]
            set_gradients(runtime, index)
            world.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            optimizer.step(RATE)
            if index >= WARM:
                found[way].append((time.perf_counter() - wall, time.process_time() - cpu))
    one, other = (list(runtime.shards()) for runtime, _ in ways.values())
    assert all(torch.equal(a.local, b.local) for a, b in zip(one, other, strict=True)), "the results differ"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args()
    print(
        f"{'size':>4} {'ranks':>5} {'':>6} {'shared':>10} {'repeated':>10} {'wall':>6} {'CPU':>6}   (medians, ratios)"
    )
    for size in chosen.sizes:
        for processes in chosen.processes:
            for name in ("ddp", "zero=3"):
                ranks = get_pool(processes).run(measure, size, name, chosen.steps, timeout=1800)
                wall, cpu = {}, {}
                for way in ranks[0]:
                    by_step = list(zip(*(found[way] for found in ranks), strict=True))
                    wall[way] = statistics.median(max(w for w, _ in step) for step in by_step)
                    cpu[way] = statistics.median(sum(c for _, c in step) for step in by_step)
                times = f"{wall['shared'] * 1e3:>7.1f} ms {wall['repeated'] * 1e3:>7.1f} ms"
                ratios = f"{wall['shared'] / wall['repeated']:>6.3f} {cpu['shared'] / cpu['repeated']:>6.3f}"
                print(f"{size:>4} {processes:>5} {name:>6} {times} {ratios}", flush=True)
        close_all()


if __name__ == "__main__":
    main()
