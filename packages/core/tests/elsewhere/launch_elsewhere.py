"""A launcher that submits runs to other machines: it records its arguments and starts no rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gangline import Part, hookimpl
from gangline.config import Run
from gangline.config.schema import LaunchConfig
from gangline.errors import UserError
from gangline.launch.base import Launcher
from gangline.run.directory import RunDirectory


@dataclass
class Elsewhere(LaunchConfig):
    here: ClassVar[bool] = False
    at_once: ClassVar[bool] = True

    gpus: int = 8  # GPUs of the other machines
    refuse: bool = False
    lose: bool = False  # raise an error after the submit, as if the queue did not answer

    def count_ranks(self, run: Run) -> int:
        return self.processes or run.parallel.count_ranks(self.gpus)


class ElsewhereLauncher(Launcher):
    def __init__(self, config: Elsewhere, run: Run) -> None:
        self.config, self.run = config, run

    def launch(self, directory: RunDirectory) -> int:
        if self.config.refuse:
            raise UserError("the queue is closed.")
        directory.hand_over()
        if self.config.lose:
            raise UserError("no answer from the queue.")
        RunDirectory(directory.path).lock()  # after `hand_over` another process can hold the lock
        print(f"given {directory.path.name}")
        return 7

    def launch_all(self, directories: Sequence[RunDirectory]) -> list[int]:
        if self.config.refuse:
            raise UserError("the queue is closed.")
        for directory in directories:
            directory.hand_over()
        if self.config.lose:
            raise UserError("no answer from the queue.")
        print("given", *(directory.path.name for directory in directories))
        return list(range(len(directories)))


@hookimpl
def gangline_launchers() -> Iterable[Part]:
    yield Part(
        name="elsewhere",
        config=Elsewhere,
        build="launch_elsewhere:ElsewhereLauncher",
        summary="Ranks on another machine",
    )
