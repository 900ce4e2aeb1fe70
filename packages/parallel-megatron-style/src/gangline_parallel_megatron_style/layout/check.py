"""Checks of a run's layout before any process starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gangline import Problem, UserError
from gangline.mesh import AXES, Mesh
from gangline_basics.advice import suggest_nearest
from gangline_parallel_megatron_style.layout import fits
from gangline_parallel_megatron_style.layout.factor import LayoutError
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_parallel_megatron_style.config import AxesConfig


def check(config: AxesConfig, run: Run) -> list[Problem]:
    """Return all problems of a run's layout, including problems with the sizes and the edits of the model."""
    from gangline.config.check import count_ranks

    problems = list(_find_value_problems(config, run))
    try:
        mesh = Mesh.of(config.size_axes(count_ranks(run)))
    except LayoutError as error:
        axis_sizes = [{f"parallel.{axis}": size} for axis, size in error.sizes]
        worlds = [{"launch.processes": size} for size in error.worlds]
        return [
            *problems,
            Problem(error.what, error.details[0], suggest_nearest(run, [*axis_sizes[:2], *worlds, *axis_sizes[2:]])),
        ]
    except UserError as error:
        return [*problems, error.to_problem()]
    return problems or find_model_problems(config, run, mesh)


def find_model_problems(config: AxesConfig, run: Run, mesh: Mesh) -> list[Problem]:
    """Return the problems between the model and the mesh; an empty list if the model itself has problems."""
    from gangline.model.compose import compose_model

    if any(part.check(run) for part in (run.model, *run.edits.values())):
        return []
    try:
        tree, plan = compose_model(run)
    except UserError:
        return []
    return list(fits.find_problems(config, run, mesh, tree, plan))


def _find_value_problems(config: AxesConfig, run: Run) -> Iterator[Problem]:
    yield from _find_chunk_problems(config, run)
    if config.overlap and not SCHEDULES[config.schedule].pairs:
        what = f"parallel.overlap=true: parallel.schedule={config.schedule} does not overlap forwards with backwards."
        other = next(name for name, other in SCHEDULES.items() if other.pairs)
        yield Problem(what, "", suggest_nearest(run, [{"parallel.schedule": other}, {"parallel.overlap": None}]))


def _find_chunk_problems(config: AxesConfig, run: Run) -> Iterator[Problem]:
    chunks, kind = config.chunks, SCHEDULES[config.schedule]
    if chunks is None or chunks == kind.chunks:
        return
    what = f"parallel.chunks={chunks}: parallel.schedule={config.schedule}"
    if not kind.free_chunks:
        each = f"has exactly {kind.chunks} chunk{'s' * (kind.chunks > 1)} per rank."
        other = next(name for name, other in SCHEDULES.items() if other.free_chunks)
        yield Problem(
            f"{what} {each}", "", suggest_nearest(run, [{"parallel.chunks": None}, {"parallel.schedule": other}])
        )
    elif chunks < 2:
        why = "Interleaving needs several chunks per rank."
        fix = suggest_nearest(run, [{"parallel.chunks": None}, {"parallel.schedule": "1f1b"}])
        yield Problem(f"{what} needs at least 2 chunks per rank.", why, fix)


def format_mesh(mesh: Mesh) -> str:
    """Format the axis sizes of a mesh as text: "pp 2 x dp_shard 2 x tp 2"."""
    return " x ".join(f"{axis} {mesh.size(axis)}" for axis in AXES if mesh.size(axis) > 1) or "1 rank"
