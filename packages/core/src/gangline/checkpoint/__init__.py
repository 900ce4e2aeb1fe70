"""Keeping a run's state."""

from gangline.checkpoint.base import Checkpointer, Handle, SaveFailed
from gangline.checkpoint.id import CheckpointId

__all__ = ["CheckpointId", "Checkpointer", "Handle", "SaveFailed"]
