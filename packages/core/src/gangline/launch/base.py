"""The launcher contract: a run directory in, processes out.

The configuration of any part may name processes that must run before the ranks start (`PartConfig.list_sidecars`), and
modules that a server of forked ranks imports once (`PartConfig.preload`).
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
    """What a launcher makes ready while a run is still composed: capability `preparation`, a class without arguments.

    Core calls that of the default launcher alone, and only if ranks start on this machine.
    """

    @abstractmethod
    def start(self) -> None:
        """Begin, and return at once."""

    @abstractmethod
    def stop(self) -> None:
        """End what was begun, if anything was: no ranks will be started here."""


def get_preparation() -> Preparation | None:
    """Return the preparation of the default launcher; None: it has none."""
    make = registry.load_capability(build_default_part("launch"), "preparation")
    preparation: Preparation | None = None if make is None else make()
    return preparation


class Launcher(ABC):
    """Starts the workers of a run, keeps watch and owns their end."""

    @abstractmethod
    def launch(self, directory: RunDirectory) -> int:
        """Run to the end; the exit code of the run. Leaves no process behind, whatever happens.

        Each rank is a process with the variables of torchrun that calls `gangline.train.rank.train_rank`.

        The directory is held by this process, and its lock is the launcher's from now on: one whose ranks run elsewhere
        (`LaunchConfig.here`) hands it over (`RunDirectory.hand_over`) as soon as a job may have it. If it raises
        UserError before that, core deletes a directory that is new; afterwards the directory is kept.
        """

    def launch_all(self, directories: Sequence[RunDirectory]) -> list[int]:
        """The runs of a sweep together; the exit code of each. Asked for where `LaunchConfig.at_once` says so.

        All have the same options of the launcher. Raises NotImplementedError where runs go one after the other.
        """
        raise NotImplementedError(f"{type(self).__name__} takes one run after the other")
