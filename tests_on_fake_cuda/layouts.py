"""Steps of a rank in any layout, on the fake device and on the CPU, with fake peers that hold the same data."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache

import torch

from gangline.comm.wrap import WrappedComms
from gangline.mesh import Mesh
from gangline_parallel_megatron_style.explain.fake_comms import FakeComms
from gangline_testkit.fake_cuda.comms import CheckedComm
from gangline_testkit.fake_cuda.watch import Watch
from gangline_testkit.runs import build_small_run
from gangline_testkit.trainer import Trainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SIZES = (
    "model.layers=2",
    "model.dim=64",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn_dim=96",
    "model.vocab_size=256",
    "batch.global_size=4",
    "batch.micro_size=1",
    "batch.sequence_length=32",
    "run.deterministic=false",
)
STEPS = 2  # the first step allocates; the last one is counted


@dataclass(frozen=True)
class Layout:
    """A layout of `world` ranks, and the rank that runs. kind: of the samples, as in `gangline_testkit.inputs`."""

    name: str
    settings: tuple[str, ...] = ()
    world: int = 1
    rank: int = 0
    kind: str = "whole"

    def __str__(self) -> str:
        return self.name

    @property
    def states_precision(self) -> bool:
        return any(setting.startswith("precision=") for setting in self.settings)


@dataclass
class Stepped:
    """Losses and gradient norms of all steps; waits, kernels and problems of the last one."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def run_layout(layout: Layout, device: torch.device, *settings: str, watched: bool = True) -> Stepped:
    """Run the steps of a layout on a device. Settings are added to those of the layout.

    watched: count waits and kernels, which keeps torch.compile from compiling
    """
    stepped = Stepped()
    run = build_small_run(*SIZES, *layout.settings, *settings)
    mesh = Mesh.of(run.parallel.size_axes(layout.world))
    comms = WrappedComms(FakeComms(mesh, layout.rank, device), lambda comm: CheckedComm(comm, stepped.problems))
    trainer = Trainer.of(run, device, mesh, comms)
    trainer.prepare(0, STEPS, layout.kind)
    for number in range(STEPS):
        watch = Watch()
        with watch if watched else nullcontext():
            loss, norm = trainer.step(number, layout.kind)
        stepped.losses.append(loss)
        stepped.norms.append(norm)
        stepped.waits, stepped.kernels = watch.waits, watch.kernels
    return stepped


@cache
def measure(layout: Layout) -> Stepped:
    """Return the steps of a layout on the fake device, in bf16 unless it has another precision; each runs once."""
    return run_layout(layout, CUDA, *([] if layout.states_precision else ["precision=bf16"]))
