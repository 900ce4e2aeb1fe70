"""Completion of overrides to a run that can be planned: missing options are assumed and reported."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, fields, replace
from math import ceil, log2

from gangline import UserError
from gangline.config import BatchSection, ParallelConfig, Run
from gangline.config.check import count_ranks, find_layout_problems, find_meaningless
from gangline.config.compose import compose_one
from gangline.explain.explained import Explained, Kernels
from gangline.mesh import Mesh
from gangline.model.compose import compose_model
from gangline.model.tree import Node
from gangline.plan import Plan
from gangline.plugin.registry import installed
from gangline_basics.cluster.file import Cluster

LENGTH = 8192  # tokens per sequence, as Llama 3 (arXiv 2407.21783, table 4)
STEP = 2**22  # tokens per step, as Llama 2 (arXiv 2307.09288, section 2.2), and early steps of Llama 3
SHARERS = 8  # maximum ranks per sequence of the global batch: Llama 3 405B has 16,384 GPUs for 2,048 sequences
PRECISION = "bf16"


@dataclass(frozen=True)
class Planned:
    """Run to plan, with its model.

    words: the user's overrides, unchanged; assumed: overrides that the planner appends for unset options
    """

    run: Run
    words: tuple[str, ...]
    assumed: tuple[str, ...]
    model: tuple[Node, Plan]

    @property
    def world(self) -> int:
        return count_ranks(self.run)


def complete_words(words: Sequence[str]) -> Planned:
    """Return the run of the overrides `words`; precision, sequence length, batch and strategy are assumed if unset.

    Nothing is assumed with a recipe or another run (`from`, `resume`), which sets all of these options. The layout is
    not checked. Raises UserError for invalid overrides.
    """
    names = {word.lstrip("+").partition("=")[0] for word in words}
    complete = bool(names & {"recipe", "from", "resume"})
    assumed: tuple[str, ...] = ()
    if not complete and "run.device=cpu" not in words and not any(name.split(".")[0] == "precision" for name in names):
        assumed += (f"precision={PRECISION}",)
    if not complete and "parallel" not in names:
        assumed += choose_strategy(words)
    run = compose_one([*words, *assumed])
    if not complete and "batch" not in names and not find_meaningless(run):
        batch = choose_batch_sizes(run.batch, names, count_ranks(run))
        batch_options = [
            item.name for item in fields(batch) if getattr(batch, item.name) != getattr(run.batch, item.name)
        ]
        assumed = (*(f"batch.{name}={getattr(batch, name)}" for name in batch_options), *assumed)
        run = replace(run, batch=batch)
    if problems := find_meaningless(run):
        raise UserError.of(problems)
    return Planned(run, tuple(words), assumed, compose_model(run))


def choose_batch_sizes(batch: BatchSection, names: Set[str], world: int) -> BatchSection:
    """Return `batch` with sizes of published pre-training runs for the options that are not in `names`.

    A microbatch size is assumed only if the sequence length or the global batch size is assumed too; otherwise `train`
    finds it.
    """
    length = "batch.sequence_length" not in names
    sequences = names.isdisjoint({"batch.global_size", "batch.ramp"})
    if length:
        batch = replace(batch, sequence_length=LENGTH)
    micro = batch.micro_size
    if "batch.micro_size" not in names and (length or sequences):
        micro = 2 ** int(log2(max(1, LENGTH // batch.sequence_length))) if sequences else 1
        batch = replace(batch, micro_size=micro)
    if sequences:
        least = max(STEP // batch.sequence_length, world // SHARERS)
        unit = world * (micro or 1)
        size = ceil(least / unit) * unit if least >= unit else max(2 ** ceil(log2(least)), micro or 1)
        batch = replace(batch, global_size=size)
    return batch


def choose_strategy(words: Sequence[str]) -> tuple[str, ...]:
    """Return (`parallel=NAME`,) if the overrides name no strategy and the default strategy does not fit, else ().

    The default does not fit if it lacks an option that the overrides set, or does not support the number of ranks. Of
    the installed strategies that fit, the strategy with most layouts is chosen; of equals, the first.
    """
    names = {word: word.lstrip("+").partition("=")[0].split(".") for word in words}
    options = {name[1] for name in names.values() if name[0] == "parallel" and len(name) > 1}
    run = compose_one([word for word, name in names.items() if name[0] != "parallel"])
    if find_meaningless(run) or _has_room(run.parallel, options, count_ranks(run)):
        return ()
    layout_counts: dict[str, int] = {}
    for name, offer in installed().get_offers("parallel").items():
        config = offer.part.config()
        world = run.launch.processes or config.count_ranks(0)
        if _has_room(config, options, world):
            layout_counts[name] = sum(1 for _ in config.iterate_layouts(replace(run, parallel=config), world))
    return (f"parallel={max(layout_counts, key=layout_counts.__getitem__)}",) if layout_counts else ()


def _has_room(config: ParallelConfig, options: set[str], world: int) -> bool:
    try:
        return options <= {item.name for item in fields(config)} and bool(config.size_axes(world) or world == 1)
    except UserError:
        return False


def check_run(run: Run) -> UserError | None:
    """Return why this run is impossible, by the checks of its parts and its layout; None if it is possible."""
    try:
        problems = [problem for part in (run.model, *run.edits.values()) for problem in part.check(run)]
        problems += run.parallel.check(run) or find_layout_problems(run)
    except UserError as error:
        return error
    return UserError.of(problems) if problems else None


def explain(case: Planned, run: Run, cluster: Cluster) -> Explained:
    """Return memory, work and transfers of a run by its parallel strategy. Raises UserError if it has no `explain`."""
    mesh = Mesh.of(run.parallel.size_axes(case.world))
    explanation = run.parallel.explain(run, mesh, case.model, cluster.topology)
    if explanation is None:
        raise UserError(
            "gangline plan does not support this parallel strategy.",
            "The configuration of the strategy must implement `explain`.",
            "Choices: parallel=single, parallel=ddp, or a strategy of gangline-parallel-megatron-style.",
        )
    return replace(explanation, kernels=get_kernels(run))


def get_kernels(run: Run) -> Kernels:
    """Return how operations between matmuls run: "fused" if blocks are compiled, else "apart"."""
    return "fused" if run.job.compile else "apart"
