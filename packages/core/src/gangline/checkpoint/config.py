"""The built-in checkpointers' configurations. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gangline.errors import Problem
from gangline.parts import CheckpointConfig, Part

if TYPE_CHECKING:
    from gangline.config.schema import Run


@dataclass
class TorchCheckpoint(CheckpointConfig):
    """Checkpoints in the files of torch.distributed.checkpoint, with checksums, made visible by one rename."""

    keep_last: int | None = None  # the newest so many are kept (with 1 there is none to fall back on); null: all

    def check(self, run: Run) -> list[Problem]:
        problems = []
        if self.every is not None and not (str(self.every).isdecimal() and int(self.every) > 0):
            problems.append(
                Problem(
                    f"checkpoint.every={self.every} is not a number of steps.",
                    "checkpoint=torch cannot choose the interval by itself.",
                    "checkpoint.every=100, or null to save only at the end.",
                )
            )
        if self.keep_last is not None and self.keep_last < 1:
            problems.append(
                Problem(
                    f"checkpoint.keep_last={self.keep_last} would keep no checkpoint.",
                    "A run that is interrupted goes on from the newest one.",
                    "checkpoint.keep_last=1 keeps the newest; checkpoint=off saves none.",
                )
            )
        return problems


@dataclass
class Off(CheckpointConfig):
    """Nothing is kept; an interrupted run starts again."""

    at_end: bool = False  # nothing is kept at the end either


PARTS = (
    Part(
        name="torch",
        config=TorchCheckpoint,
        build="gangline.checkpoint.torch_dcp:build",
        summary="torch.distributed.checkpoint files with checksums; saved by any layout, read by any other",
    ),
    Part(
        name="off",
        config=Off,
        build="gangline.checkpoint.off:build",
        summary="keep nothing",
    ),
)
