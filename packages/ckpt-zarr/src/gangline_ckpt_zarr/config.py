"""Options of `checkpoint=zarr`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gangline import Problem
from gangline.config import CheckpointConfig, NonNegativeInt, PositiveFloat, PositiveInt, Sidecar

if TYPE_CHECKING:
    from gangline.config import Run

SUCCESSOR_SECONDS = 120.0  # how long the memory of a node whose agent was killed waits for the next one


@dataclass
class ZarrCheckpoint(CheckpointConfig):
    """Checkpoints in zarr v3: written beside training, every byte checked, in up to three tiers."""

    file_options: ClassVar[tuple[str, ...]] = ("path", "durable")

    path: str | None = None  # a directory or URL (s3://...) for the run's checkpoints; null: RUN_DIR/checkpoints
    keep_last: PositiveInt | None = None  # the newest so many stay (with 1 there is none to fall back on); null: all
    keep_every: PositiveInt | None = None  # those of every so many steps are kept for good
    verify: bool = True  # check every checksum when loading
    memory_every: PositiveInt | None = None  # steps between saves to the machine's memory, for lost workers; null: none
    memory_copies: NonNegativeInt = 0  # other nodes that keep a copy of it, for nodes that are lost
    durable: str | None = None  # a directory or URL for what must outlive `path`, copied from there beside training
    durable_every: PositiveInt | None = None  # steps between saves there, a multiple of `every`; null: each save
    durable_keep_last: PositiveInt | None = None  # as keep_last, there
    durable_keep_every: PositiveInt | None = None  # as keep_every, there
    mtbf_hours: PositiveFloat | None = None  # mean time between failures, for every=auto; null: as seen, 24 at first
    deadline_seconds: PositiveFloat = 600.0  # how long a store may fail or stay silent before a save is given up

    def list_sidecars(self, run: Run) -> list[Sidecar]:
        """What keeps the machine's memory tier while workers come and go."""
        if self.memory_every is None:
            return []
        waits = SUCCESSOR_SECONDS if run.launch.shares else 0.0
        target = "gangline_ckpt_zarr.tiers.keeper:keep"
        return [
            Sidecar(name="checkpoint-memory", target=target, args=(waits, run.launch.shares), outlives=waits + 10.0)
        ]

    def check(self, run: Run) -> list[Problem]:
        if self.memory_copies and self.memory_every is None:
            what = f"checkpoint.memory_copies={self.memory_copies}: there is no memory tier to copy."
            return [Problem(what, "", "checkpoint.memory_every=1 saves to it after each step.")]
        if self.durable is None and (self.durable_every or self.durable_keep_last or self.durable_keep_every):
            what = "checkpoint.durable_... is set, and there is no durable store."
            return [Problem(what, "", "checkpoint.durable=s3://bucket/run names one.")]
        return []
