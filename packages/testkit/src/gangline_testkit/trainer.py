"""A runtime and its optimizer on any device and any mesh, for tests and benchmarks that run steps without a session."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gangline.batch import Batch
from gangline.comm.base import Comms
from gangline.comm.transport import connect
from gangline.config.schema import Run
from gangline.mesh import Mesh
from gangline.model.compose import Composed, compose_model
from gangline.model.document_ends import find_ends, tell_ends
from gangline.model.init import initialise
from gangline.optimizer import Optimizer
from gangline.plugin import registry
from gangline.runtime import Job, Runtime
from gangline.train.recompute_and_compile import make_finish
from gangline_testkit.inputs import share


@dataclass
class Trainer:
    """A runtime and its optimizer, and microbatches that are already on the device, by (step, kind)."""

    run: Run
    runtime: Runtime
    optimizer: Optimizer
    device: torch.device
    ready: dict[tuple[int, str], list[Batch]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        run: Run,
        device: torch.device,
        mesh: Mesh | None = None,
        comms: Comms | None = None,
        drawn: bool = True,
    ) -> Trainer:
        """Build the trainer of a run. mesh, comms: of several ranks; None: one process.

        drawn: start with the run's own initial weights, which the host draws; false: with other weights, drawn faster
        on the device
        """
        mesh = mesh or Mesh.of({})
        comms = comms or connect(mesh, device=device, deterministic=run.deterministic)
        tree, plan = compose_model(run)
        finish = make_finish(run.job.recompute, run.job.compile, run.job.recompute_every, plan.seams)
        precision = registry.build(run.precision, run)
        runtime = registry.build(run.parallel, Job(Composed(run, tree, plan), mesh, comms, precision, finish))
        if drawn:
            initialise(runtime.shards(), plan, run.seed)
        else:
            for shard in runtime.shards():
                if shard.local.is_floating_point():
                    shard.local.normal_(std=0.02) if shard.local.ndim > 1 else shard.local.fill_(1.0)
        return cls(run, runtime, registry.build(run.optimizer, run, runtime), device)

    def prepare(self, first: int, stop: int, kind: str) -> None:
        """Make the microbatches of these steps on the device, so that a timed step does not make them."""
        self.ready = {(number, kind): self.make_microbatches(number, kind) for number in range(first, stop)}

    def make_microbatches(self, number: int, kind: str) -> list[Batch]:
        """Return the microbatches that this rank reads in step `number`."""
        batch, vocabulary = self.run.batch, getattr(self.run.model, "vocab_size", None) or 256
        index, width = self.runtime.data_coordinate
        micro = batch.micro_size or 1
        sizes = {
            "size": batch.global_size,
            "micro_size": micro,
            "length": batch.sequence_length,
            "vocab_size": vocabulary,
        }
        batches = []
        for source in share(number, index, width, **sizes, kind=kind):
            batches.append(source.to(self.device))
            if source.document is not None:
                assert batches[-1].document is not None
                tell_ends(batches[-1].document, find_ends(source.document))  # as the readers of `train` do
        return batches

    def step(self, number: int, kind: str = "ragged") -> tuple[float, float]:
        """Run step `number`; return (loss per token, gradient norm)."""
        result = self.runtime.step(self.ready.pop((number, kind), []) or self.make_microbatches(number, kind))
        norm = self.runtime.clip(1.0)
        self.optimizer.step(1e-3)
        self.runtime.finish_update()
        return result.loss_sum / result.tokens, norm

    def run_steps(self, count: int = 3, kind: str = "ragged") -> tuple[list[float], list[float]]:
        """Run the first steps; return (losses per token, gradient norms)."""
        losses, norms = zip(*(self.step(number, kind) for number in range(count)), strict=True)
        return list(losses), list(norms)
