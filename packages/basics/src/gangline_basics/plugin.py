"""Plugin hooks of this package: each folder has its configurations and a tuple `PARTS` in `config.py`."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Command, Part, hookimpl
from gangline_basics.callback import config as callback
from gangline_basics.checkpoint import config as checkpoint
from gangline_basics.data import config as data
from gangline_basics.gradients import config as gradients
from gangline_basics.launch import config as launch
from gangline_basics.model import config as model, presets
from gangline_basics.optimizer import config as optimizer
from gangline_basics.parallel import config as parallel
from gangline_basics.precision import config as precision
from gangline_basics.schedule import config as schedule
from gangline_basics.track import config as track


@hookimpl
def gangline_models() -> Iterable[Part]:
    return (*model.PARTS, *presets.PARTS)


@hookimpl
def gangline_parallel_strategies() -> Iterable[Part]:
    return parallel.PARTS


@hookimpl
def gangline_gradient_reductions() -> Iterable[Part]:
    return gradients.PARTS


@hookimpl
def gangline_precisions() -> Iterable[Part]:
    return precision.PARTS


@hookimpl
def gangline_optimizers() -> Iterable[Part]:
    return optimizer.PARTS


@hookimpl
def gangline_schedules() -> Iterable[Part]:
    return schedule.PARTS


@hookimpl
def gangline_checkpointers() -> Iterable[Part]:
    return checkpoint.PARTS


@hookimpl
def gangline_data_sources() -> Iterable[Part]:
    return data.PARTS


@hookimpl
def gangline_trackers() -> Iterable[Part]:
    return track.PARTS


@hookimpl
def gangline_callbacks() -> Iterable[Part]:
    return callback.PARTS


@hookimpl
def gangline_launchers() -> Iterable[Part]:
    return launch.PARTS


@hookimpl
def gangline_commands() -> Iterable[Command]:
    runs = "gangline_basics.runs"
    yield Command(name="runs", run=f"{runs}.command:main", summary="List the runs in a directory, with their states")
    yield Command(name="compare", run=f"{runs}.compare:main", summary="Compare the options and curves of runs")
    yield Command(name="report", run=f"{runs}.report.command:main", summary="Write a report of runs as one HTML file")
    yield Command(
        name="schema",
        run="gangline_basics.json_schema:main",
        summary="Print the JSON Schema of a run's configuration, for editors",
    )
    yield Command(
        name="sample", run="gangline_basics.sampling.command:main", summary="Generate text with the model of a run"
    )
