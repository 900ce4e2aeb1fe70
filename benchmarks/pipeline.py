"""Compare pipelines with their formula (bubble) and with torch (actions, split backward), and measure overlap.

    python benchmarks/pipeline.py --processes 2 4 [--only bubble overlap action split]

bubble   stages that sleep, so that few cores suffice; the work of a rank is the same for every schedule
overlap  dualpipe_v with such stages that contain transfers: without transfers, with serial actions, and overlapped
action   small real stages: milliseconds of a step per action of a rank, of gangline and torch.distributed.pipelining
split    milliseconds of forward and backward of several linear layers in one process
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gangline.mesh import Mesh
from gangline.model import forward_context
from gangline.model.linear import Linear
from gangline.model.linear_nodes import LinearNode
from gangline.model.weight_grads import defer
from gangline_basics.precision.plain import Plain
from gangline_parallel_megatron_style.pipeline.actions import Schedule
from gangline_parallel_megatron_style.pipeline.executor import Executor
from gangline_parallel_megatron_style.pipeline.rank_stages import RankStages
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES
from gangline_parallel_megatron_style.pipeline.simulate import Span, Timeline
from gangline_parallel_megatron_style.pipeline.split_linear import split_linear
from gangline_parallel_megatron_style.pipeline.weight_grad_store import WeightGradStore
from gangline_testkit import rank
from gangline_testkit.pool import close_all, get_pool

NAPS = ["1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"]
PEERS = {"1f1b": "Schedule1F1B", "interleaved_1f1b": "ScheduleInterleaved1F1B", "zb_v": "ScheduleZBVZeroBubble"}
DIM, ROWS, LAYERS = 64, 16, 2
FP32 = Plain(torch.float32, torch.float32)


class Nap(torch.autograd.Function):
    """Autograd function whose F, I and W sleep the same time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        defer(lambda: time.sleep(ctx.seconds))
        return gradient, None


class Transfer(torch.autograd.Function):
    """Autograd function that waits for a transfer, forward and backward; the rank may compute meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        Transfer.wait(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        Transfer.wait(ctx.seconds)
        return gradient, None

    @staticmethod
    def wait(seconds: float) -> None:
        arrives = time.perf_counter() + seconds
        forward_context.overlap_point()
        time.sleep(max(0.0, arrives - time.perf_counter()))


class Parts(RankStages):
    """The modules of this rank's chunks; the loss is the sum of squares."""

    last: int | None = None  # the chunk with the last stage

    def __init__(self, parts: list[Callable], x: torch.Tensor) -> None:
        super().__init__()
        self.parts, self.x = parts, x

    def forward(self, chunk: int, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        out = self.parts[chunk](self.x if hidden is None else hidden)
        return out.square().sum() if chunk == self.last else out

    def backward(self, chunk: int, microbatch: int, output: torch.Tensor, grad: torch.Tensor | None) -> None:
        output.backward(grad)

    def allocate_hidden(self, microbatch: int) -> torch.Tensor:
        return torch.empty_like(self.x)


def chunk_of(executor: Executor, microbatches: int, stage: int) -> int | None:
    """Return the chunk of a stage, or None if the stage is on another rank."""
    where, chunk = executor.get_schedule(microbatches).get_place(stage % executor.get_schedule(microbatches).stages)
    return chunk if where == rank.index else None


def pipeline(name: str, microbatches: int, parts: list[Callable], overlap: bool = False) -> Executor:
    comm = rank.make_comms(Mesh.of({"pp": rank.world}), False).get_comm("pp")
    stage = Parts(parts, torch.ones(ROWS, DIM))
    executor = Executor(stage, comm, name, clock=time.perf_counter, overlap=overlap)
    stage.last = chunk_of(executor, microbatches, -1)
    return executor


def nap(name: str, microbatches: int, seconds: float) -> tuple[Schedule, tuple[Span, ...]]:
    """Return the schedule, and this rank's recorded spans of one step."""
    chunks = SCHEDULES[name].chunks
    x = torch.ones(ROWS, DIM, requires_grad=True)
    naps = [0.0] * chunks

    def part(chunk: int) -> Callable:
        return lambda hidden: Nap.apply(hidden if hidden.requires_grad else x, naps[chunk])

    executor = pipeline(name, microbatches, [part(chunk) for chunk in range(chunks)])
    executor.step(microbatches)  # connects the ranks before the measurement
    naps[:] = [seconds / chunks] * chunks
    rank.make_comms(Mesh.of({"pp": rank.world}), False).world.barrier()
    executor.step(microbatches)
    return executor.get_schedule(microbatches), executor.spans


def bubble(processes: list[int], microbatches: int, seconds: float) -> None:
    print(f"\nbubble: F = I = W = {seconds * 1e3:g} ms for all chunks of a rank, {microbatches} microbatches")
    print(f"{'ranks':>5} {'schedule':<18} {'measured':>9} {'formula':>9} {'step':>9} {'x 1F1B':>9}")
    for world in processes:
        base = None
        for name in NAPS:
            found = get_pool(world).run(nap, name, microbatches, seconds)
            timeline = Timeline(found[0][0], tuple(spans for _, spans in found))
            measured = 1 - 3 * microbatches * seconds / timeline.makespan
            formula = SCHEDULES[name].compute_bubble(world, microbatches, SCHEDULES[name].chunks)
            base = base or timeline.makespan
            print(
                f"{world:>5} {name:<18} {measured:>9.3f} {formula:>9.3f} {timeline.makespan:>7.2f} s "
                f"{base / timeline.makespan:>9.3f}",
                flush=True,
            )


def travel(microbatches: int, seconds: float, transfer: float, overlap: bool) -> float:
    """Return the seconds of a step whose chunks have four blocks, which compute `seconds` and wait for a transfer."""
    x = torch.ones(ROWS, DIM, requires_grad=True)
    times = [0.0, 0.0]

    def part(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden if hidden.requires_grad else x
        for _ in range(4):
            hidden = Transfer.apply(Nap.apply(hidden, times[0]), times[1])
        return hidden

    executor = pipeline("dualpipe_v", microbatches, [part, part], overlap)
    executor.step(microbatches)
    times[:] = seconds, transfer
    world = rank.make_comms(Mesh.of({"pp": rank.world}), False).world
    world.barrier()
    start = time.perf_counter()
    executor.step(microbatches)
    world.barrier()
    return time.perf_counter() - start


def overlaps(processes: list[int], seconds: float) -> None:
    print("\noverlap: dualpipe_v, four microbatches per rank, a transfer after each block; seconds per step")
    print(f"{'ranks':>5} {'transfer / F':>12} {'none':>8} {'serial':>8} {'overlap':>8} {'hidden share':>12}")
    for world in processes:
        for share in (0.25, 1.0):
            none, row, turns = (
                max(get_pool(world).run(travel, 4 * world, seconds, transfer, overlap, timeout=600))
                for transfer, overlap in ((0.0, False), (share * seconds, False), (share * seconds, True))
            )
            hidden = (row - turns) / (row - none)
            print(f"{world:>5} {share:>12} {none:>8.2f} {row:>8.2f} {turns:>8.2f} {hidden:>12.2f}", flush=True)


def layers(split: bool) -> nn.Module:
    made = [Linear(LinearNode(in_features=DIM, out_features=DIM)) for _ in range(LAYERS)]
    for layer in made:
        nn.init.normal_(layer.weight, std=DIM**-0.5)
        if split:
            layer.matmul = split_linear(FP32)
    return nn.Sequential(*made)


def actions(name: str, microbatches: int, steps: int) -> tuple[dict[str, list[tuple[float, float]]], int]:
    """Return (wall, CPU) seconds of alternating steps of gangline and torch, and the actions of this rank per step."""
    from torch.distributed import pipelining

    world = rank.make_comms(Mesh.of({"pp": rank.world}), False).world
    chunks = SCHEDULES[name].chunks
    ours = pipeline(name, microbatches, [layers(SCHEDULES[name].splits_backward) for _ in range(chunks)])
    schedule = ours.get_schedule(microbatches)
    stages = [schedule.get_stage(rank.index, chunk) for chunk in range(chunks)]
    parts = [pipelining.PipelineStage(layers(False), stage, schedule.stages, torch.device("cpu")) for stage in stages]
    peer = getattr(pipelining.schedules, PEERS[name])(
        parts if chunks > 1 else parts[0],
        microbatches,
        loss_fn=lambda out, target: out.square().sum(),
        scale_grads=False,
    )
    x = torch.ones(ROWS * microbatches, DIM)

    def theirs() -> None:
        last = schedule.stages - 1 in stages
        peer.step(*([x] if 0 in stages else []), **({"target": x, "losses": []} if last else {}))

    found: dict[str, list[tuple[float, float]]] = {"ours": [], "torch": []}
    for index in range(steps + 2):
        runs = [("ours", lambda: ours.step(microbatches)), ("torch", theirs)]
        for key, run in reversed(runs) if index % 2 else runs:
            world.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            run()
            if index >= 2:
                found[key].append((time.perf_counter() - start, time.process_time() - cpu))
    return found, len(schedule.actions[rank.index])


def action(processes: list[int], microbatches: int, steps: int) -> None:
    print(f"\naction: {LAYERS} layers of {DIM} per stage, {microbatches} microbatches, median ms of {steps} steps")
    print(f"{'':>24} {'wall of the slowest rank':^26}  {'CPU of all ranks':^26}  {'gangline, per action':^16}")
    print(f"{'ranks':>5} {'schedule':<18} {'gangline':>9} {'torch':>9} {'':>6}  {'gangline':>9} {'torch':>9} {'':>6}")
    for world in processes:
        for name in PEERS:
            ranks = get_pool(world).run(actions, name, microbatches, steps, timeout=600)
            wall, cpu = {}, {}
            for key in ("ours", "torch"):
                by_step = list(zip(*(found[key] for found, _ in ranks), strict=True))
                wall[key] = 1e3 * statistics.median(max(w for w, _ in step) for step in by_step)
                cpu[key] = 1e3 * statistics.median(sum(c for _, c in step) for step in by_step)
            columns = [
                f"{of['ours']:>9.1f} {of['torch']:>9.1f} {of['ours'] / of['torch']:>6.2f} " for of in (wall, cpu)
            ]
            count = ranks[0][1]
            each = f"{wall['ours'] / count:>7.3f} {cpu['ours'] / count / world:>7.3f}"
            print(f"{world:>5} {name:<18} {' '.join(columns)} {each}", flush=True)


def halves(dim: int, rows: int, depth: int) -> dict[str, Callable[[], None]]:
    """Return four ways to run forward and backward of several linear layers."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    node = LinearNode(in_features=dim, out_features=dim)
    layers = [(Linear(node), Linear(node)) for _ in range(depth)]
    for one, other in layers:
        nn.init.normal_(one.weight, std=dim**-0.5)
        other.weight.data.copy_(one.weight.data)
        other.matmul = split_linear(FP32)
    plain, split = (nn.Sequential(*made) for made in zip(*layers, strict=True))
    x = torch.randn(rows, dim)
    gradient, store = torch.randn(rows, dim), WeightGradStore()

    def whole(module: nn.Module) -> None:
        module(x.clone().requires_grad_()).backward(gradient)

    def deferred() -> None:
        out = split(x.clone().requires_grad_())
        with store.open(0, 0):
            out.backward(gradient)
        store.run(0, 0)

    def peer() -> None:
        leaf = x.clone().requires_grad_()
        out = plain(leaf)
        _, groups = stage_backward_input([out], [gradient], [leaf], plain.parameters())
        stage_backward_weight(plain.parameters(), groups)

    ways = {"unsplit": lambda: whole(plain), "gangline, at once": lambda: whole(split), "gangline, I then W": deferred}
    return {**ways, "torch, I then W": peer}


def split(repeats: int) -> None:
    print("\nsplit: 8 layers, 256 rows, float32, one thread; medians (relative to the unsplit backward)")
    close_all()  # ends other processes, so that the machine is idle
    torch.set_num_threads(1)
    for dim in (128, 256, 512):
        ways = halves(dim, 256, 8)
        found: dict[str, list[float]] = {way: [] for way in ways}
        for index in range(repeats + 3):
            for way, run in ways.items():
                start = time.perf_counter()
                run()
                if index >= 3:
                    found[way].append(time.perf_counter() - start)
        base = statistics.median(found["unsplit"])
        words = [
            f"{way} {1e3 * statistics.median(times):.2f} ms ({statistics.median(times) / base:.2f})"
            for way, times in found.items()
        ]
        print(f"dim {dim}: " + ", ".join(words), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--nap", type=float, default=0.1, help="seconds of F, of I and of W for all chunks of a rank")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=["bubble", "overlap", "action", "split"])
    chosen = parser.parse_args()
    processes, microbatches = chosen.processes, chosen.microbatches
    parts: dict[str, Callable[[], None]] = {
        "bubble": lambda: bubble(processes, microbatches, chosen.nap),
        "overlap": lambda: overlaps(processes, chosen.nap / 10),
        "action": lambda: action(processes, microbatches, chosen.steps),
        "split": lambda: split(chosen.repeats),
    }
    for name in chosen.only or parts:
        parts[name]()
    close_all()


if __name__ == "__main__":
    main()
