"""Rank functions for the tests of compressed gradient reductions."""

from __future__ import annotations

from collections import Counter

import torch
from runtimes import runtime_of
from torch import Tensor

from gangline.batch import Batch
from gangline.comm.base import Comm
from gangline.comm.wrap import Wrapped, WrappedComms
from gangline.config.defaults import build_default_run
from gangline.mesh import Mesh
from gangline.shard import name_dtype
from gangline_basics.gradients.config import RoundedGradients, SignGradients, SumGradients
from gangline_basics.model.config import DecoderConfig
from gangline_basics.optimizer.adamw import build as build_adamw
from gangline_basics.optimizer.config import Adamw
from gangline_basics.precision.plain import Plain
from gangline_parallel_megatron_style.config import ThreeD
from gangline_parallel_megatron_style.runtime import ComposedRuntime
from gangline_testkit import rank

MODEL = DecoderConfig(vocab_size=32, dim=32, layers=2, heads=2, ffn_dim=64, init_std=0.08)
LENGTH, ROWS = 16, 4


class Counting(Wrapped):
    """Communicator that adds up the bytes this rank passes to each kind of collective."""

    def __init__(self, inner: Comm, into: Counter[str]) -> None:
        super().__init__(inner)
        self.into = into

    def _count(self, kind: str, x: Tensor) -> None:
        self.into[kind] += x.numel() * x.itemsize

    def _all_reduce(self, x, op, background):
        self._count("all_reduce", x)
        return self.inner._all_reduce(x, op, background)

    def _all_gather(self, x, into, background):
        self._count("all_gather", x)
        return self.inner._all_gather(x, into, background)

    def _reduce_scatter(self, x, background):
        self._count("reduce_scatter", x)
        return self.inner._reduce_scatter(x, background)

    def _all_to_all(self, x, in_splits, out_splits, background):
        self._count("all_to_all", x)
        return self.inner._all_to_all(x, in_splits, out_splits, background)


def batch_of(step: int) -> Batch:
    """Return sequences that count up by a constant stride, with one token in ten replaced at random."""
    generator = torch.Generator().manual_seed(step * 100 + rank.index)
    start, stride = torch.randint(0, 32, (2, ROWS, 1), generator=generator)
    tokens = (start + (stride % 4 + 1) * torch.arange(LENGTH + 1)) % 32
    noise = torch.rand(tokens.shape, generator=generator) < 0.1
    tokens = torch.where(noise, torch.randint(0, 32, tokens.shape, generator=generator), tokens)
    position, mask = torch.arange(LENGTH).expand(ROWS, LENGTH), torch.ones(ROWS, LENGTH, dtype=torch.bool)
    sample = torch.arange(ROWS) + ROWS * (rank.index + rank.world * step)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, position, sample, step=step)


def built(
    zero: int,
    gradients: str,
    axes: dict[str, int] | None = None,
    counter: Counter[str] | None = None,
    after: int = 10,
    compute: torch.dtype = torch.float32,
) -> ComposedRuntime:
    """Build a runtime with initialized weights; `counter` counts the bytes passed to collectives on each axis."""
    axes = axes or {"dp_replicate": 1, "dp_shard": rank.world}
    parallel = ThreeD(tp=1, pp=1, zero=zero, **axes)
    kinds = {"sum": SumGradients(), "bf16": RoundedGradients(), "onebit": SignGradients(start_step=after)}
    comms = rank.make_comms(Mesh.of(parallel.size_axes(rank.world)), False)
    if counter is not None:
        comms = WrappedComms(comms, lambda comm: ByAxis(comm, counter))
    run = build_default_run(model=MODEL, parallel=parallel, gradients=kinds[gradients])
    return runtime_of(run, comms=comms, precision=Plain(compute, torch.float32))


class ByAxis(Counting):
    """Counts the bytes of a collective twice: under "axis call" and under "axis call dtype"."""

    def _count(self, kind: str, x: Tensor) -> None:
        super()._count(f"{self.axis} {kind}", x)
        super()._count(f"{self.axis} {kind} {str(x.dtype).removeprefix('torch.')}", x)


def trained(zero: int, gradients: str, steps: int, broken: bool) -> float:
    """Train and return the mean loss of the last five steps.

    broken: set the error feedback to zero before each step.
    """
    runtime = built(zero, gradients)
    run = build_default_run(model=MODEL)
    optimizer = build_adamw(Adamw(weight_decay=0.0), run, runtime)
    last = []
    for step in range(steps):
        if broken:
            for shard in runtime.local()[1]:
                shard.local.zero_()
        result = runtime.step([batch_of(step)])
        runtime.clip(None)
        optimizer.step(3e-3 * min(1, 2 * (1 - step / steps)))
        if step >= steps - 5:
            last.append(result.loss_sum / result.tokens)
    return sum(last) / len(last)


def pieces_grad(runtime: ComposedRuntime) -> list[Tensor]:
    return [piece.tensor.grad.clone() for named in runtime.parameters() for piece in named.pieces]


def first_gradients(zero: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the gradients of step 0: uncompressed, compressed from step 1 on, and compressed from step 0 on."""
    found = []
    for reduction, after in (("sum", 0), ("onebit", 1), ("onebit", 0)):
        runtime = built(zero, reduction, after=after)
        runtime.step([batch_of(0)])
        found.append(pieces_grad(runtime))
    return found[0], found[1], found[2]


def local_arrays(zero: int, axes: dict[str, int]) -> tuple[tuple, dict[str, int], bool]:
    """Return (names and shapes of the error-feedback arrays, this rank's first rows, whether step 0 fills them)."""
    runtime = built(zero, "onebit", axes, after=0)
    registry, shards = runtime.local()
    before = all(not shard.local.any() for shard in shards)
    runtime.step([batch_of(0)])
    names = tuple((name, registry[name].shape) for name in registry)
    return names, {shard.name: shard.offset[0] for shard in shards}, before and all(s.local.any() for s in shards)


def bytes_by_axis(zero: int, gradients: str, axes: dict[str, int]) -> tuple[Counter[str], int]:
    """Return (bytes of one step by axis and collective, number of parameters of the model)."""
    found: Counter[str] = Counter()
    runtime = built(zero, gradients, axes, found, after=0)
    runtime.step([batch_of(0)])
    numbers = sum(torch.Size(shape).numel() for shape in runtime.made.shapes.values())
    return Counter({key: count for key, count in found.items() if len(key.split()) == 2}), numbers


def dtypes_on_the_wire(zero: int) -> tuple[set[str], set[str], set[str]]:
    """Return (dtypes that ranks add up, dtypes that ranks gather, dtypes of the gradients that this rank keeps).

    Collectives that carry at most 1000 bytes in a step are left out.
    """
    found: Counter[str] = Counter()
    runtime = built(zero, "sum", None, found, compute=torch.bfloat16)
    runtime.step([batch_of(0)])
    big = [key.split() for key, count in found.items() if count > 1000 and len(key.split()) == 3]
    summed = {dtype for _, call, dtype in big if call in ("all_reduce", "reduce_scatter", "all_to_all")}
    gathered = {dtype for _, call, dtype in big if call == "all_gather"}
    return summed, gathered, {name_dtype(x.dtype) for x in pieces_grad(runtime)}
