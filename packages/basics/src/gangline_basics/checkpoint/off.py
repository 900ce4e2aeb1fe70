"""Checkpointer that stores nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gangline.checkpoint.base import Checkpointer, SaveFailed, SaveHandle, SaveRequest
from gangline.checkpoint.id import CheckpointId
from gangline.errors import UserError

if TYPE_CHECKING:
    from gangline.comm.base import Store
    from gangline.config.schema import Run
    from gangline.shard import Registry, Shard
    from gangline_basics.checkpoint.config import Off

WHY = "checkpoint=off stores no checkpoints"


class NoCheckpointer(Checkpointer):
    """Checkpointer that stores nothing, so it has nothing to load."""

    keeps = False

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir

    @property
    def run_dir(self) -> str:
        return self._run_dir

    def save(
        self, request: SaveRequest, shards: Sequence[Shard], registry: Registry, document: dict[str, Any]
    ) -> SaveHandle:
        """Raise SaveFailed, because this checkpointer stores nothing."""
        raise SaveFailed(CheckpointId(request.step, document.get("attempt", 1)), WHY)

    def list(self):
        return []

    def read_document(self, id: CheckpointId) -> dict[str, Any]:
        """Raise UserError, because this checkpointer stores nothing."""
        raise UserError(f"checkpoint {id} does not exist.", WHY)

    def read_shapes(self, id: CheckpointId) -> dict[str, tuple[int, ...]]:
        """Raise UserError, because this checkpointer stores nothing."""
        raise UserError(f"checkpoint {id} does not exist.", WHY)

    def load(self, id: CheckpointId, shards: Iterable[Shard], registry: Registry) -> None:
        """Raise UserError, because this checkpointer stores nothing."""
        raise UserError(f"checkpoint {id} does not exist.", WHY)


def build(config: Off, run: Run, store: Store | None) -> NoCheckpointer:
    """Return a checkpointer that stores nothing."""
    return NoCheckpointer(run.job.dir or "")
