"""Options of `checkpoint=zarr`. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gangline import Problem
from gangline.config import CheckpointConfig, NonNegativeInt, PositiveFloat, PositiveInt, Sidecar

if TYPE_CHECKING:
    from gangline.config import Run

SUCCESSOR_SECONDS = 120.0  # seconds for which a keeper waits for the next agent of its node after the agent was killed


@dataclass
class ZarrCheckpoint(CheckpointConfig):
    """Checkpoints in zarr v3: saved in the background, every byte checked, in up to three tiers."""

    file_options: ClassVar[tuple[str, ...]] = ("path", "durable")

    path: str | None = None  # directory or URL (s3://...) of the run's checkpoints; null: RUN_DIR/checkpoints
    # number of newest checkpoints to keep; null: all. With 1, a damaged checkpoint has no older one to fall back to
    keep_last: PositiveInt | None = None
    # interval in steps at which older checkpoints are kept, besides the newest keep_last; null: none
    keep_every: PositiveInt | None = None
    verify: bool = True  # verification of the checksum of every chunk that a load reads
    # steps between saves to the memory tier, which survives killed workers; null: no memory tier
    memory_every: PositiveInt | None = None
    # number of other nodes that store a copy of a node's memory tier, to survive lost nodes
    memory_copies: NonNegativeInt = 0
    # directory or URL of the durable tier, to which checkpoints are copied in the background; null: no durable tier
    durable: str | None = None
    # steps between saves to the durable tier, a multiple of checkpoint.every; null: every save
    durable_every: PositiveInt | None = None
    durable_keep_last: PositiveInt | None = None  # number of newest checkpoints to keep in the durable tier; null: all
    # interval in steps at which the durable tier keeps older checkpoints, besides durable_keep_last; null: none
    durable_keep_every: PositiveInt | None = None
    # mean time between failures (MTBF) in hours, for checkpoint.every=auto; null: estimated from the run, 24 at first
    mtbf_hours: PositiveFloat | None = None
    # maximum seconds for which a request is retried if the store fails or does not answer
    deadline_seconds: PositiveFloat = 600.0

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
        return list(self._check_durable_interval())

    def _check_durable_interval(self) -> Iterator[Problem]:
        """Yield a problem if saves would rarely or never be at a multiple of durable_every."""
        if self.durable_every is None or self.every is None:
            return
        why = "Only a save at a multiple of checkpoint.durable_every is copied to the durable tier."
        if self.every == "auto":
            what = f"checkpoint.durable_every={self.durable_every} needs a fixed checkpoint.every, not auto."
            yield Problem(what, why, f"checkpoint.every={self.durable_every}; or checkpoint.durable_every=null")
        elif rest := self.durable_every % int(self.every):
            low, high = self.durable_every - rest, self.durable_every - rest + int(self.every)
            what = f"checkpoint.durable_every={self.durable_every} is not a multiple of checkpoint.every={self.every}."
            yield Problem(what, why, " or ".join(f"checkpoint.durable_every={n}" for n in (low, high) if n))
