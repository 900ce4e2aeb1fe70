"""A run in one process, step by step and without a model, that calls the checkpointer as the loop does."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from made import composed

from gangline.checkpoint.id import CheckpointId
from gangline.mesh import Mesh
from gangline.run import attempts
from gangline.run.attempts import Attempt
from gangline_ckpt_zarr.checkpointer import ZarrCheckpointer, build
from gangline_testkit import checkpointer_ranks as kit

REGISTRY = kit.build_registry(Mesh.of({}))


class Job:
    """A run whose workers can be restarted; every second step is saved to disk. `words`: more overrides."""

    def __init__(self, run_dir: Path, *words: str) -> None:
        self.run_dir, self.words = run_dir, words
        self.checkpointer: ZarrCheckpointer | None = None

    def start(self) -> ZarrCheckpointer:
        """Start new workers: close the old checkpointer, build another one and record the attempt."""
        self.end()
        run = composed(self.run_dir, "checkpoint.every=2", "run.steps=99", *self.words)
        self.checkpointer = build(run.checkpoint, run, dist.HashStore())
        self.newest = self.checkpointer.find_latest()
        attempts.append(self.run_dir, Attempt(attempts.read_current(self.run_dir), self.newest and str(self.newest)))
        return self.checkpointer

    def step(self, step: int, salt: int | None = None, attempt: int = 1) -> list[str]:
        """Save a step as the loop does, and return the names of the tiers that then have it."""
        self.save(step, salt, attempt)
        return self.where(step, attempt)

    def save(self, step: int, salt: int | None = None, attempt: int = 1) -> None:
        assert self.checkpointer is not None
        request = self.checkpointer.get_due_save(step, 0.1, 2)
        if request is not None:
            shards = kit.make_shards(REGISTRY, step if salt is None else salt)
            document = kit.make_document(step, attempt, step)
            handle = self.checkpointer.save(request, shards, REGISTRY, document)
            handle.settled.result()

    def where(self, step: int, attempt: int = 1) -> list[str]:
        assert self.checkpointer is not None
        return [tier.name for tier in self.checkpointer.tiers if CheckpointId(step, attempt) in tier.list_ids()]

    def load(self, step: int, attempt: int = 1) -> list[str]:
        """Load a checkpoint and return the shards that differ from the saved values."""
        assert self.checkpointer is not None
        shards = kit.make_shards(REGISTRY, None)
        self.checkpointer.load(CheckpointId(step, attempt), shards, REGISTRY)
        return kit.find_wrong(shards, step)

    def end(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.close()
