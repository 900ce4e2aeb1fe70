"""Alternatives of a run: all layouts that its overrides leave unset (axes, folds, microbatches, recomputation)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import product
from typing import NamedTuple

from gangline.config import ParallelConfig, PartConfig, Recompute, Run
from gangline.mesh import AXES, DATA_AXES, Mesh
from gangline.model.compose import compose_model
from gangline_planner.assumed import Planned

LARGEST = 8  # maximum microbatch size to try if the overrides leave it unset, in sequences


class LaidOut(NamedTuple):
    """A candidate layout of a run, and its mesh. case: planner input of the same model."""

    case: Planned
    run: Run
    parallel: ParallelConfig
    mesh: Mesh


def lay_out_alternatives(case: Planned) -> Iterator[list[LaidOut]]:
    """Yield lists of alternatives whose global batch is divisible over the mesh.

    The alternatives of a list differ only in recomputation, least recomputation first.
    """
    size, world = case.run.batch.global_size, case.world
    for one, parallel, bases in iterate_alternatives(case):
        mesh = build_mesh(parallel, world)
        share, rest = divmod(size, mesh.size(*DATA_AXES))
        for runs in () if rest else bases:
            if not share % (runs[0].batch.micro_size or 1):
                yield [LaidOut(one, run, parallel, mesh) for run in runs]


def build_mesh(parallel: ParallelConfig, world: int) -> Mesh:
    """Return the mesh of a layout: from its options if they set all axes, else from `parallel.size_axes`."""
    sizes = tuple((axis, getattr(parallel, axis, None)) for axis in AXES)
    named = all(size is not None for _, size in sizes)
    return _intern_mesh(sizes if named else tuple(parallel.size_axes(world).items()))


@cache
def _intern_mesh(sizes: tuple[tuple[str, int], ...]) -> Mesh:
    """Return the mesh of the axis sizes; layouts with equal sizes share one object."""
    return Mesh.of(dict(sizes))


def iterate_alternatives(case: Planned) -> Iterator[tuple[Planned, ParallelConfig, list[list[Run]]]]:
    """Yield (case, layout, runs[microbatch size][recomputation]) for all layouts that the overrides leave unset.

    case: `case`, or a copy whose edits have other options, such as sizes of folds. Options that the user set are fixed.
    """
    run = case.run
    option_names = {get_option_name(word) for word in case.words}
    fixed = [name for name in (item.name for item in fields(run.parallel)) if f"parallel.{name}" in option_names]
    recompute_modes = (run.job.recompute,) if "run.recompute" in option_names else tuple(Recompute)
    for edited in _iterate_edits(case, option_names):
        ways = [replace(run.job, recompute=recompute) for recompute in recompute_modes]
        batches = [replace(run.batch, micro_size=micro) for micro in _list_micro_sizes(run, option_names)]
        bases = [[replace(edited.run, batch=batch, job=way) for way in ways] for batch in batches]
        for parallel in edited.run.parallel.iterate_layouts(edited.run, case.world):
            if all(getattr(parallel, name) == getattr(run.parallel, name) for name in fixed):
                yield edited, parallel, bases


def _iterate_edits(case: Planned, typed: set[str]) -> Iterator[Planned]:
    """Yield the case, and a copy for each other value of its edits' layout options, such as sizes of folds."""
    groups = list(case.run.edits)
    for options in product(*(config.iterate_layouts(case.run, case.world) for config in case.run.edits.values())):
        edits = dict(zip(groups, options, strict=True))
        names = {f"{group}.{name}" for group in groups for name in list_changes(case.run.edits[group], edits[group])}
        if not names:
            yield case
        elif typed.isdisjoint(names):
            run = replace(case.run, edits=edits)
            yield replace(case, run=run, model=compose_model(run))


def _list_micro_sizes(run: Run, typed: set[str]) -> list[int | None]:
    if "batch.micro_size" in typed:
        return [run.batch.micro_size]
    size = run.batch.global_size
    powers = [2**power for power in range(LARGEST.bit_length()) if size % 2**power == 0]
    return list(dict.fromkeys((run.batch.micro_size, *powers)))


def list_changes(before: PartConfig, after: PartConfig) -> list[str]:
    """Return the names of the options that differ between two configurations of the same class."""
    if before is after:
        return []
    return [item.name for item in fields(after) if getattr(before, item.name) != getattr(after, item.name)]


def list_overrides(before: Run, after: Run) -> tuple[str, ...]:
    """Return the overrides that turn the run `before` into the run `after`."""
    overrides = [
        f"parallel.{name}={getattr(after.parallel, name)}" for name in list_changes(before.parallel, after.parallel)
    ]
    for group, edit in after.edits.items():
        overrides += [f"{group}.{name}={getattr(edit, name)}" for name in list_changes(before.edits[group], edit)]
    if after.batch.micro_size != before.batch.micro_size:
        overrides.append(f"batch.micro_size={after.batch.micro_size}")
    if after.job.recompute != before.job.recompute:
        overrides.append(f"run.recompute={after.job.recompute.value}")
    return tuple(overrides)


def get_option_name(word: str) -> str:
    """Return the name of the option that an override sets, such as "parallel.tp"."""
    return word.lstrip("+").partition("=")[0]
