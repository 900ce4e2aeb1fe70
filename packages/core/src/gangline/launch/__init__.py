"""From a run directory to running processes."""

from gangline.launch.base import Launcher
from gangline.launch.sidecars import Sidecar

__all__ = ["Launcher", "Sidecar"]
