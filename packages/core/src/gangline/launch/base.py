"""The launcher contract: a launcher starts the processes of a run directory and waits for their end.

The configuration of any part may name processes that must run before the ranks start (`PartConfig.list_sidecars`), and
modules that the fork server imports once, before it forks the ranks (`PartConfig.preload`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gangline.config.defaults import build_default_part
from gangline.plugin import registry

if TYPE_CHECKING:
    from gangline.run.directory import RunDirectory


class Preparation(ABC):
    """Work that a launcher does while a run is being composed: capability `preparation`, built without arguments.

    Core uses only the preparation of the default launcher, and only if the ranks will probably start on this machine.
    """

    @abstractmethod
    def start(self) -> None:
        """Start the work in the background and return at once."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the work, if it was started: no ranks will start here."""


def get_preparation() -> Preparation | None:
    """Return the preparation of the default launcher, or None if it has none."""
    make = registry.load_capability(build_default_part("launch"), "preparation")
    preparation: Preparation | None = None if make is None else make()
    return preparation


class Launcher(ABC):
    """Starts the ranks of a run, watches them and ends them."""

    @abstractmethod
    def launch(self, directory: RunDirectory) -> int:
        """Run the ranks to their end and return the run's exit code. Leaves no process behind, whatever happens.

        Each rank is a process with the variables of torchrun that calls `gangline.train.rank.train_rank`.

        This process holds the directory's lock, and the launcher owns the lock from now on. A launcher whose ranks run
        elsewhere (`LaunchConfig.here`) calls `RunDirectory.hand_over` as soon as a job may have the directory. On a
        UserError before that call, core deletes a new directory; after the call, core keeps the directory.
        """

    def launch_all(self, directories: Sequence[RunDirectory]) -> list[int]:
        """Launch the runs of a sweep together; return each run's exit code. Called if `LaunchConfig.at_once` is true.

        All runs have equal launcher options. Raises NotImplementedError if the launcher takes one run at a time.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot launch several runs together")
