"""Where a run's records go."""

from gangline.track.base import Start, Tracker

__all__ = ["Start", "Tracker"]
