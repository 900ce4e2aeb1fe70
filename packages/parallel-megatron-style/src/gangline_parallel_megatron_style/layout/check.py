"""Everything about a layout that can be refused before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gangline.config.suggest import near
from gangline.errors import Problem, UserError
from gangline.mesh import AXES, Mesh
from gangline_parallel_megatron_style.layout import fits
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline_parallel_megatron_style.config import Composed

CONTEXTS = ("ring", "ulysses")
COMPRESSIONS = ("none", "bf16", "onebit")


def refuse_sizes(config: Composed) -> None:
    """Raises UserError for an axis with less than one rank."""
    wrong = [f"parallel.{axis}={size}" for axis, size in config.named().items() if size < 1]
    if wrong:
        raise UserError(f"{', '.join(wrong)} must be at least 1.", "An axis that is not wanted has size 1.")


def check(config: Composed, run: Run) -> list[Problem]:
    """All that is wrong with the layout of a run, the model's sizes and edits included."""
    from gangline.config.check import world_of

    problems = list(_values(config))
    try:
        mesh = Mesh.of(config.axes(world_of(run)))
    except UserError as error:
        return [*problems, error.problem()]
    return problems or model_problems(config, run, mesh)


def model_problems(config: Composed, run: Run, mesh: Mesh) -> list[Problem]:
    """What does not fit between the model and the mesh; nothing where the model itself is refused."""
    from gangline.model.compose import compose_model

    if any(part.check(run) for part in (run.model, *run.edits.values())):
        return []
    try:
        tree, plan = compose_model(run)
    except UserError:
        return []
    return list(fits.problems(config, run, mesh, tree, plan))


def _values(config: Composed) -> Iterator[Problem]:
    words: dict[str, Sequence[str]] = {"schedule": list(SCHEDULES), "context": CONTEXTS, "compress": COMPRESSIONS}
    for name, known in words.items():
        yield from _word(name, getattr(config, name), known)
    if config.zero not in (0, 1, 2, 3):
        yield Problem(
            f"parallel.zero={config.zero} must be 0, 1, 2 or 3.",
            "1 cuts the optimizer state over the data ranks, 2 gradients too, 3 weights too; 0 cuts nothing.",
        )
    if config.compress_after < 0:
        yield Problem(f"parallel.compress_after={config.compress_after} must not be negative.")
    if config.prefetch < 0:
        yield Problem(f"parallel.prefetch={config.prefetch} must not be negative.")
    if config.stages is not None and min(config.stages, default=0) < 1:
        yield Problem(f"parallel.stages={config.stages}: every stage has at least one block.")
    if config.schedule in SCHEDULES:
        yield from _chunks(config)
        if config.overlap and not SCHEDULES[config.schedule].pairs:
            what = f"parallel.overlap=true: schedule {config.schedule} has no forward beside a backward."
            other = next(name for name, other in SCHEDULES.items() if other.pairs)
            yield Problem(what, "", f"parallel.schedule={other}, or parallel.overlap=null")
    yield from config.topology.problems()


def _word(name: str, value: str, known: Sequence[str]) -> Iterator[Problem]:
    if value not in known:
        what = f"parallel.{name}={value} does not exist."
        yield Problem(what, near(value, known), f"Choices: {', '.join(known)}.")


def _chunks(config: Composed) -> Iterator[Problem]:
    chunks, kind = config.chunks, SCHEDULES[config.schedule]
    if chunks is None or chunks == kind.chunks:
        return
    what = f"parallel.chunks={chunks}: schedule {config.schedule}"
    if not kind.free_chunks:
        each = f"has exactly {kind.chunks} chunk{'s' * (kind.chunks > 1)} a rank."
        other = next(name for name, other in SCHEDULES.items() if other.free_chunks)
        yield Problem(f"{what} {each}", "", f"parallel.chunks=null; or parallel.schedule={other}, which may have more.")
    elif chunks < 2:
        why = "With one chunk a rank there is nothing to interleave."
        yield Problem(f"{what} needs at least 2.", why, "parallel.chunks=null; or parallel.schedule=1f1b")


def shown(mesh: Mesh) -> str:
    """A layout in words: "pp 2 x dp_shard 2 x tp 2"."""
    return " x ".join(f"{axis} {mesh.size(axis)}" for axis in AXES if mesh.size(axis) > 1) or "1 rank"
