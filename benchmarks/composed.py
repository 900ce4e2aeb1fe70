"""Compare a 2 x 2 x 2 layout on eight processes with torch's implementations, and with one process.

    python benchmarks/composed.py [--steps 8] [--width 128 256]

torch: DTensor tensor parallelism with sequence parallelism, torch.distributed.pipelining (1F1B) and FSDP2 on the same
decoder. Steps of gangline and torch alternate in one process group, after warm-up steps. Prints medians and ratios of
the wall seconds of the slowest rank and of the CPU seconds of all. Goal: at most 0.45 x.

Then the tokens per second of the eight processes are compared with one process with one thread per core, alternating,
at the width `--wide`, where matmuls take longer than communication. Goal: at least 0.8 x.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from gangline.batch import Batch
from gangline.config.defaults import build_default_run
from gangline.config.schema import Run
from gangline.config.sections import Recompute
from gangline.mesh import Mesh
from gangline.model.compose import Composed, compose_model
from gangline.model.init import initialise, make_whole_model
from gangline.model.linear import Linear
from gangline.plugin.registry import build
from gangline.runtime import Job
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.decoder import Decoder
from gangline_basics.precision.plain import Plain
from gangline_testkit import rank
from gangline_testkit.pool import close_all, get_pool

VOCABULARY, LAYERS, WARM, MICROS, DATA = 256, 4, 2, 4, 2  # MICROS microbatches on each of DATA data ranks


def run_of(width: int, rows: int, length: int, parallel: str) -> Run:
    """Return the run that gangline and torch train, with `rows` sequences per microbatch."""
    model = DecoderConfig(vocab_size=VOCABULARY, dim=width, layers=LAYERS, heads=8, ffn_dim=3 * width)
    batch = {"global_size": rows * MICROS * DATA, "micro_size": rows, "sequence_length": length}
    return build_default_run(model=model, parallel=parallel, batch=batch, optimizer="adamw", checkpoint="off")


def batch_of(step: int, number: int, rows: int, length: int) -> Batch:
    """Return microbatch `number` of a step."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    tokens = torch.randint(0, VOCABULARY, (rows, length + 1), generator=generator)
    position, mask = torch.arange(length).expand(rows, length), torch.ones(rows, length, dtype=torch.bool)
    targets = tokens[:, 1:].contiguous()
    return Batch(tokens[:, :-1].contiguous(), targets, mask, position, torch.arange(rows), step=step)


def ours(run: Run) -> Callable[[int], float]:
    """Return a function: step number -> loss per token of a step of gangline with the run's strategy."""
    tree, plan = compose_model(run)
    mesh = Mesh.of(run.parallel.size_axes(rank.world))
    precision = Plain(torch.float32, torch.float32)
    comms, finish = rank.make_comms(mesh, False), make_finish(Recompute.none, False)
    runtime = build(run.parallel, Job(Composed(run, tree, plan), mesh, comms, precision, finish))
    initialise(runtime.shards(), plan, run.seed)
    optimizer = build(run.optimizer, run, runtime)
    index, width = runtime.data_coordinate
    share = MICROS * DATA // width

    def step(number: int) -> float:
        rows, length = run.batch.micro_size or 1, run.batch.sequence_length
        micros = [batch_of(number, index * share + i, rows, length) for i in range(share)]
        result = runtime.step(micros)
        runtime.clip(1.0)
        optimizer.step(1e-3)
        return result.loss_sum / result.tokens

    return step


class TorchStage(nn.Module):
    """Half of the decoder, of torch's layers: tokens or hidden state in, hidden state or logits out."""

    def __init__(self, run: Run, stage: int) -> None:
        super().__init__()
        tree, plan = compose_model(run)
        model = make_whole_model(tree, plan, seed=run.seed)
        for path, module in list(model.named_modules()):
            if isinstance(module, Linear):
                linear = nn.Linear(module.weight.shape[1], module.weight.shape[0], bias=False)
                linear.weight = module.weight
                model.set_submodule(path, linear)
        assert isinstance(model, Decoder)
        half = LAYERS // 2
        self.blocks = model.blocks[:half] if stage == 0 else model.blocks[half:]
        self.embed: nn.Module | None = None
        self.head: nn.Module | None = None
        if stage == 0:
            self.embed = nn.Embedding.from_pretrained(model.get_parameter("embed.weight").detach(), freeze=False)
        else:
            weight = model.get_parameter("head.weight").detach()
            output = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            output.weight = nn.Parameter(weight)
            self.head = nn.Sequential(OrderedDict(norm=model.get_submodule("head.norm"), output=output))
        self.length = run.batch.sequence_length

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(self.length).expand(x.shape[0], self.length)
        batch = Batch(position, position, position >= 0, position, torch.arange(x.shape[0]))
        hidden = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            hidden = block(hidden, batch)
        return hidden if self.head is None else self.head(hidden)

    def cut(self, mesh: DeviceMesh) -> None:
        """Shard the layers as in torch's tutorial on tensor parallelism."""
        between = Shard(1)
        layers: dict = {}
        for block in (f"blocks.{index}" for index in range(len(self.blocks))):
            for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w_gate", "feed_forward.w_up"):
                layers[f"{block}.{name}"] = ColwiseParallel()
            for name in ("attention.wo", "feed_forward.w_down"):
                layers[f"{block}.{name}"] = RowwiseParallel(output_layouts=between)
            layers[f"{block}.attention"] = PrepareModuleInput(
                input_layouts=(between, None), desired_input_layouts=(Replicate(), None)
            )
            layers[f"{block}.feed_forward"] = PrepareModuleInput(
                input_layouts=(between,), desired_input_layouts=(Replicate(),)
            )
            layers[f"{block}.attention_norm"] = layers[f"{block}.feed_forward_norm"] = SequenceParallel()
        if self.embed is not None:
            layers["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        else:
            layers["head.norm"] = SequenceParallel()
            layers["head.output"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
        parallelize_module(self, mesh, layers)


def theirs(run: Run) -> Callable[[int], float]:
    """Return a function: step number -> loss of a step of torch on the mesh (pp 2, dp 2, tp 2)."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    index, data = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    module = TorchStage(run, index)
    module.cut(mesh["tp"])
    for block in module.blocks:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), foreach=True)
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule = Schedule1F1B(stage, MICROS, loss_fn=loss)
    rows, length = run.batch.micro_size or 1, run.batch.sequence_length

    def step(number: int) -> float:
        optimizer.zero_grad()
        micros = [batch_of(number, data * MICROS + i, rows, length) for i in range(MICROS)]
        if index == 0:
            schedule.step(torch.cat([batch.tokens for batch in micros]))
            value = torch.zeros(())
        else:
            losses: list[Tensor] = []
            schedule.step(target=torch.cat([batch.targets for batch in micros]), losses=losses)
            value = torch.stack(losses).mean().detach()
        total = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        total = total.full_tensor() if hasattr(total, "full_tensor") else total
        nn.utils.clip_grads_with_norm_(module.parameters(), 1.0, total)
        optimizer.step()
        torch.distributed.all_reduce(value)
        return float(value) / 4  # two data ranks, each with two tp ranks

    return step


def compared(width: int, rows: int, length: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Return (wall, CPU) seconds of each step of gangline and torch on this rank; their order changes every step."""
    run = run_of(width, rows, length, "3d")
    built = {"ours": ours(run), "torch": theirs(run)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in built}
    for number in range(steps + WARM):
        losses = {}
        for name in sorted(built, reverse=bool(number % 2)):
            torch.distributed.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            losses[name] = built[name](number)
            if number >= WARM:
                found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        if number == 0:
            assert abs(losses["ours"] - losses["torch"]) < 1e-4 * losses["torch"], losses
    return found


_kept: dict[tuple, Callable[[int], float]] = {}


def timed(width: int, rows: int, length: int, parallel: str, numbers: list[int], threads: int) -> float:
    """Return the seconds of these steps on this rank. The model is built once."""
    key = width, rows, length, parallel
    torch.set_num_threads(threads)
    if key not in _kept:
        _kept[key] = ours(run_of(width, rows, length, parallel))
        _kept[key](0)
    start = time.perf_counter()
    for number in numbers:
        _kept[key](number)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, nargs="*", default=[128, 256])
    parser.add_argument("--rows", type=int, default=1, help="sequences per microbatch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--wide", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    print(f"{'width':>5} {'gangline':>9} {'torch':>9} {'wall':>6} {'CPU':>6}   (2 x 2 x 2, medians, ratios)")
    for width in chosen.width:
        ranks = get_pool(8).run(compared, width, chosen.rows, chosen.length, chosen.steps, timeout=1800)
        wall, cpu = {}, {}
        for name in ("ours", "torch"):
            by_step = list(zip(*(found[name] for found in ranks), strict=True))
            wall[name] = statistics.median(max(w for w, _ in step) for step in by_step)
            cpu[name] = statistics.median(sum(c for _, c in step) for step in by_step)
        ratios = f"{wall['ours'] / wall['torch']:>6.3f} {cpu['ours'] / cpu['torch']:>6.3f}"
        print(f"{width:>5} {wall['ours']:>8.3f}s {wall['torch']:>8.3f}s {ratios}", flush=True)
    close_all()
    cores = len(os.sched_getaffinity(0))
    seconds: dict[str, list[float]] = {"3d": [], "single": []}
    for turn in range(chosen.rounds):
        for parallel, world, threads in (("3d", 8, 1), ("single", 1, cores)):
            numbers = [3 * turn + 1, 3 * turn + 2, 3 * turn + 3]
            arguments = chosen.wide, 2, 2 * chosen.length, parallel, numbers, threads
            seconds[parallel].append(max(get_pool(world).run(timed, *arguments, timeout=1800)))
    both = {name: statistics.median(found) / 3 for name, found in seconds.items()}
    speed = both["single"] / both["3d"]
    print(
        f"width {chosen.wide}, s per step: {both['3d']:.3f} on 2 x 2 x 2, {both['single']:.3f} on one process", end=""
    )
    print(f" with {cores} threads; ratio of throughputs {speed:.3f}")
    close_all()


if __name__ == "__main__":
    main()
