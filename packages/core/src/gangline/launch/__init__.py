"""From a run directory to running processes: what a launcher imports. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.lazy import lazily

if TYPE_CHECKING:
    from gangline.config.schema import Sidecar as Sidecar
    from gangline.launch.base import Launcher as Launcher
    from gangline.launch.config import LocalLaunch as LocalLaunch
    from gangline.launch.guard import die_with as die_with
    from gangline.launch.local import LocalLauncher as LocalLauncher

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.config.schema": "Sidecar",
        "gangline.launch.base": "Launcher",
        "gangline.launch.config": "LocalLaunch",
        "gangline.launch.guard": "die_with",
        "gangline.launch.local": "LocalLauncher",
    },
)
