"""Plugin hooks of gangline-dataloader: its data sources and the command `gangline data`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Command, Part, hookimpl
from gangline_dataloader import config
from gangline_dataloader.dali import config as dali
from gangline_dataloader.images import config as images


@hookimpl
def gangline_data_sources() -> Iterable[Part]:
    return (*config.PARTS, *dali.PARTS, *images.PARTS)


@hookimpl
def gangline_commands() -> Iterable[Command]:
    return [
        Command(
            name="data",
            run="gangline_dataloader.commands:main",
            summary="Prepare a training corpus, verify or show a corpus",
        )
    ]
