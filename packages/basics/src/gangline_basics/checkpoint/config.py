"""Configurations of the built-in checkpointers. Torch-free."""

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
    """Checkpoints in the format of torch.distributed.checkpoint, with checksums and an atomic commit by one rename."""

    keep_last: PositiveInt | None = None  # number of newest checkpoints to keep (1: no fallback if damaged); null: all

    def check(self, run: Run) -> list[Problem]:
        if self.every != "auto":
            return []
        why = "checkpoint=torch does not compute an optimal checkpoint interval."
        return [
            Problem(
                "checkpoint.every=auto is not supported by checkpoint=torch.",
                why,
                "checkpoint.every=100 saves every 100 steps; checkpoint.every=null saves only at the end.",
            )
        ]


@dataclass
class Off(CheckpointConfig):
    """No checkpoints: an interrupted run restarts from step 0."""

    at_end: bool = False  # final checkpoint after the last step; not supported by checkpoint=off


PARTS = (
    Part(
        name="torch",
        config=TorchCheckpoint,
        default=True,
        synonyms={"keep_last": "save_total_limit keep_latest_k max_checkpoints"},
        build="gangline_basics.checkpoint.torch_dcp:build",
        summary="torch.distributed.checkpoint files with checksums; saved with any layout, loadable with any other",
    ),
    Part(
        name="off",
        config=Off,
        build="gangline_basics.checkpoint.off:build",
        summary="no checkpoints",
    ),
)
