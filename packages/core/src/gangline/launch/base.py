"""The launcher contract: a run directory in, processes out.

Any part's configuration may say what has to be there before the ranks are:

    sidecars(run) -> list[gangline.launch.Sidecar]     # processes that stand beside the ranks of each machine
    preload(run) -> list[str]                          # modules for every rank, loaded once where ranks are forked
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path


class Launcher(ABC):
    """Starts the workers of a run, keeps watch and owns their end."""

    @abstractmethod
    def launch(self, run_dir: Path) -> int:
        """Run to the end; the exit code of the run. Leaves no process behind, whatever happens."""
