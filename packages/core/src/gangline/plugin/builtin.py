"""Core's own plugin: the parts and commands that come with gangline. Registered as any other plugin is.

Each room keeps a torch-free module with its configurations and a tuple `PARTS`; here they meet the hooks.
"""

from __future__ import annotations

from collections.abc import Iterable

from gangline.callback import config as callback
from gangline.checkpoint import config as checkpoint
from gangline.data import config as data
from gangline.launch import config as launch
from gangline.model import config as model, presets
from gangline.optimizer import config as optimizer
from gangline.parallel import config as parallel
from gangline.plugin.hooks import Command, hookimpl
from gangline.plugin.parts import Part
from gangline.precision import config as precision
from gangline.schedule import config as schedule
from gangline.track import config as track


@hookimpl
def gangline_parallel_strategies() -> Iterable[Part]:
    return parallel.PARTS


@hookimpl
def gangline_precisions() -> Iterable[Part]:
    return precision.PARTS


@hookimpl
def gangline_checkpointers() -> Iterable[Part]:
    return checkpoint.PARTS


@hookimpl
def gangline_data_sources() -> Iterable[Part]:
    return data.PARTS


@hookimpl
def gangline_parts() -> Iterable[Part]:
    rooms = (model, presets, optimizer, schedule, track, callback, launch)
    return [part for room in rooms for part in room.PARTS]


@hookimpl
def gangline_commands() -> Iterable[Command]:
    return (
        Command(
            name="plugins", run="gangline.cli.plugins:main", summary="What is installed, who supplies it, what failed"
        ),
        Command(name="runs", run="gangline.cli.runs:main", summary="The runs in a folder: where each stands"),
        Command(name="compare", run="gangline.cli.compare:main", summary="What differs between runs, and their curves"),
        Command(name="sample", run="gangline.cli.sample:main", summary="Write text with the model of a run"),
        Command(
            name="export",
            run="gangline.interop.commands:export_run",
            summary="Write a run's model as a Hugging Face directory",
        ),
        Command(
            name="import",
            run="gangline.interop.commands:import_model",
            summary="Show how to train on from a Hugging Face directory",
        ),
    )
