"""The built-in checkpointers' configurations. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gangline.config.ranges import PositiveInt
from gangline.config.schema import CheckpointConfig
from gangline.errors import Problem
from gangline.plugin.parts import Part

if TYPE_CHECKING:
    from gangline.config.schema import Run


@dataclass
class TorchCheckpoint(CheckpointConfig):
    """Checkpoints in the files of torch.distributed.checkpoint, with checksums, made visible by one rename."""

    keep_last: PositiveInt | None = None  # the newest so many stay (with 1 there is none to fall back on); null: all

    def check(self, run: Run) -> list[Problem]:
        if self.every != "auto":
            return []
        why = "checkpoint=torch cannot choose the interval by itself."
        return [
            Problem("checkpoint.every=auto is no number of steps.", why, "checkpoint.every=100, or null: at the end")
        ]


@dataclass
class Off(CheckpointConfig):
    """Nothing is kept; an interrupted run starts again."""

    at_end: bool = False  # nothing is kept at the end either


PARTS = (
    Part(
        name="torch",
        config=TorchCheckpoint,
        default=True,
        synonyms={"keep_last": "save_total_limit keep_latest_k max_checkpoints"},
        build="gangline_basics.checkpoint.torch_dcp:build",
        summary="torch.distributed.checkpoint files with checksums; saved by any layout, read by any other",
    ),
    Part(
        name="off",
        config=Off,
        build="gangline_basics.checkpoint.off:build",
        summary="keep nothing",
    ),
)
