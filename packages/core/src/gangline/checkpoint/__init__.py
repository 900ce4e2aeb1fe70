"""Keeping a run's state."""

from gangline.checkpoint.base import Checkpointer, CheckpointId, Handle, SaveFailed

__all__ = ["CheckpointId", "Checkpointer", "Handle", "SaveFailed"]
