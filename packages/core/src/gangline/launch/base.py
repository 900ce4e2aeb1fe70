"""The launcher contract: a run directory in, processes out.

What has to be there before the ranks, any part's configuration says (`PartConfig.sidecars`, `PartConfig.preload`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path


class Launcher(ABC):
    """Starts the workers of a run, keeps watch and owns their end."""

    @abstractmethod
    def launch(self, run_dir: Path) -> int:
        """Run to the end; the exit code of the run. Leaves no process behind, whatever happens."""
