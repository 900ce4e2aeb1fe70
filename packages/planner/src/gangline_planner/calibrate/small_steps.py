"""Steps of small models under `parallel=single`, to fit the part of the step time that is not matmuls."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gangline.batch import Batch
from gangline.comm.transport import connect
from gangline.config import Run
from gangline.config.defaults import build_default_run
from gangline.mesh import Mesh
from gangline.model.compose import Composed
from gangline.plugin import registry
from gangline.runtime import Job, Runtime
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.model.config import DecoderConfig
from gangline_basics.parallel.config import Single

MICROBATCHES = 2


@dataclass(frozen=True)
class SmallModel:
    """Size of a small model, and the shape of its microbatches."""

    dim: int
    sequence_length: int
    micro_size: int
    layers: int = 2


STARTS = SmallModel(16, 8, 1)  # so small that only kernel launches take time
MODELS = {
    "cpu": (SmallModel(64, 128, 2), SmallModel(128, 256, 2), SmallModel(256, 128, 2), SmallModel(256, 512, 2)),
    "cuda": (SmallModel(1024, 2048, 4), SmallModel(2048, 2048, 2), SmallModel(4096, 4096, 1)),
}


def build_run(model: SmallModel, device: str) -> Run:
    """Return the one-process run of a small model, to measure and to plan."""
    heads = max(2, model.dim // 64)
    return build_default_run(
        model=DecoderConfig(vocab_size=256, dim=model.dim, layers=model.layers, heads=heads, ffn_dim=4 * model.dim),
        parallel=Single(),
        precision="fp32" if device == "cpu" else "bf16",
        batch={
            "global_size": MICROBATCHES * model.micro_size,
            "micro_size": model.micro_size,
            "sequence_length": model.sequence_length,
        },
        run={"device": device},
    )


class SmallStep:
    """Training step of a small model on a fixed batch, which can be repeated."""

    def __init__(self, model: SmallModel, device: torch.device) -> None:
        run, mesh = build_run(model, device.type), Mesh.of({})
        composed, comms = Composed.of(run), connect(mesh, device=device)
        finish = make_finish(run.job.recompute, run.job.compile, run.job.recompute_every, composed.plan.seams)
        job = Job(composed, mesh, comms, registry.build(run.precision, run), finish)
        self.runtime: Runtime = registry.build(run.parallel, job)
        for shard in self.runtime.shards():
            torch.nn.init.normal_(shard.local, std=0.02)
        self.optimizer = registry.build(run.optimizer, run, self.runtime)
        self.batches = [_make_batch(model, device) for _ in range(MICROBATCHES)]

    def run_passes(self) -> None:
        """Run the forward and backward passes of all microbatches."""
        self.runtime.step(self.batches)

    def update(self) -> None:
        """Run gradient clipping and the optimizer, which follow the passes of a step."""
        self.runtime.clip(1.0)
        self.optimizer.step(1e-6)


def _make_batch(model: SmallModel, device: torch.device) -> Batch:
    shape = (model.micro_size, model.sequence_length)
    tokens = torch.randint(0, 256, (shape[0], shape[1] + 1), device=device)
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        targets=tokens[:, 1:].contiguous(),
        loss_mask=torch.ones(shape, dtype=torch.bool, device=device),
        position=torch.arange(shape[1], device=device).expand(shape),
        sample=torch.arange(shape[0], device=device),
        valid=shape[0] * shape[1],
    )
