"""Options of `checkpoint=zarr`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gangline import Problem
from gangline.config import CheckpointConfig, NonNegativeInt, PositiveFloat, PositiveInt, Sidecar

if TYPE_CHECKING:
    from gangline.config import Run

SUCCESSOR_SECONDS = 120.0  # seconds for which the keeper of a node whose agent was killed waits for the next agent


@dataclass
class ZarrCheckpoint(CheckpointConfig):
    """Checkpoints in zarr v3: saved in the background, every byte checked, in up to three tiers."""

    file_options: ClassVar[tuple[str, ...]] = ("path", "durable")

    path: str | None = None  # directory or URL (s3://...) of the run's checkpoints; null: RUN_DIR/checkpoints
    keep_last: PositiveInt | None = None  # number of newest checkpoints to keep (1: no fallback if damaged); null: all
    keep_every: PositiveInt | None = None  # steps between older checkpoints to keep besides the newest ones; null: none
    verify: bool = True  # verification of the checksum of every chunk that a load reads
    memory_every: PositiveInt | None = None  # steps between saves to the memory tier (outlives workers); null: no tier
    memory_copies: NonNegativeInt = 0  # number of copies of a node's memory tier on other nodes, to survive lost nodes
    durable: str | None = None  # directory or URL of the durable tier, filled from `path` in the background; null: none
    durable_every: PositiveInt | None = None  # steps between durable saves, a multiple of `every`; null: every save
    durable_keep_last: PositiveInt | None = None  # number of newest checkpoints to keep in the durable tier; null: all
    durable_keep_every: PositiveInt | None = None  # steps between older durable checkpoints to keep; null: none
    mtbf_hours: PositiveFloat | None = None  # mean hours between failures, for every=auto; null: measured, 24 at first
    deadline_seconds: PositiveFloat = 600.0  # maximum seconds for retries of a request to a failing or silent store

    def list_sidecars(self, run: Run) -> list[Sidecar]:
        """Return the sidecar that keeps the memory tier and outlives the workers; [] without a memory tier."""
        if self.memory_every is None:
            return []
        waits = SUCCESSOR_SECONDS if run.launch.shares else 0.0
        target = "gangline_ckpt_zarr.tiers.keeper:keep"
        return [
            Sidecar(name="checkpoint-memory", target=target, args=(waits, run.launch.shares), outlives=waits + 10.0)
        ]

    def check(self, run: Run) -> list[Problem]:
        if self.memory_copies and self.memory_every is None:
            what = f"checkpoint.memory_copies={self.memory_copies} needs checkpoint.memory_every, which is not set."
            return [Problem(what, "", "checkpoint.memory_every=1 saves to memory after each step.")]
        if self.durable is None and (self.durable_every or self.durable_keep_last or self.durable_keep_every):
            what = "checkpoint.durable_* options need a durable tier, and checkpoint.durable is not set."
            return [Problem(what, "", "Name the durable tier:  checkpoint.durable=s3://bucket/run")]
        return []
