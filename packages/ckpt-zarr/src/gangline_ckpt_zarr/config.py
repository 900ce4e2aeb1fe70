"""Options of `checkpoint=zarr`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gangline.errors import Problem
from gangline.launch.sidecars import Sidecar
from gangline.parts import CheckpointConfig

if TYPE_CHECKING:
    from gangline.config.schema import Run


@dataclass
class ZarrCheckpoint(CheckpointConfig):
    """Checkpoints in zarr v3: written beside training, every byte checked, in up to three tiers."""

    file_options: ClassVar[tuple[str, ...]] = ("path", "durable")

    path: str | None = None  # a directory or URL (s3://...) for the run's checkpoints; null: RUN_DIR/checkpoints
    keep_last: int | None = None  # the newest so many are kept (with 1 there is none to fall back on); null: all
    keep_every: int | None = None  # those of every so many steps are kept for good
    verify: bool = True  # check every checksum when loading
    memory_every: int | None = None  # steps between saves to the machine's memory, which outlive a worker; null: none
    durable: str | None = None  # a directory or URL for what must outlive `path`, copied from there beside training
    durable_every: int | None = None  # steps between saves there, a multiple of `every`; null: each save
    durable_keep_last: int | None = None  # as keep_last, there
    durable_keep_every: int | None = None  # as keep_every, there
    mtbf_hours: float | None = None  # mean time between failures, for every=auto; null: as seen, 24 at first
    deadline_seconds: float = 600.0  # how long a store may fail or stay silent before a save is given up

    def sidecars(self, run: Run) -> list[Sidecar]:
        """What keeps the machine's memory tier while workers come and go."""
        if self.memory_every is None:
            return []
        return [Sidecar(name="checkpoint-memory", target="gangline_ckpt_zarr.memory:keep")]

    def check(self, run: Run) -> list[Problem]:
        problems = []
        if self.every is not None and self.every != "auto" and not _positive(self.every):
            what = f"checkpoint.every={self.every} is not a number of steps."
            why = "A checkpoint is saved each so many steps, as often as pays (auto), or only at the end (null)."
            problems.append(Problem(what, why, "checkpoint.every=100, checkpoint.every=auto or checkpoint.every=null"))
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                of = "checkpoints" if name.endswith("last") else "steps"
                what = f"checkpoint.{name}={value} is not a number of {of}."
                problems.append(Problem(what, "", f"checkpoint.{name}=1 is the least; null leaves it out."))
        if self.durable is None and (self.durable_every or self.durable_keep_last or self.durable_keep_every):
            what = "checkpoint.durable_... is set, and there is no durable store."
            problems.append(Problem(what, "", "checkpoint.durable=s3://bucket/run names one."))
        for name in ("mtbf_hours", "deadline_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                problems.append(Problem(f"checkpoint.{name}={value} is no time.", "", f"checkpoint.{name}=24"))
        return problems


_COUNTS = ("keep_last", "keep_every", "memory_every", "durable_every", "durable_keep_last", "durable_keep_every")


def _positive(every: str | int) -> bool:
    return str(every).isdecimal() and int(every) > 0
