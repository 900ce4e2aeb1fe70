"""Completion of overrides to a run that can be planned: what a plan needs beyond them is assumed, and reported."""

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

LENGTH = 8192  # tokens per sequence: Llama 3's (arXiv 2407.21783, table 4)
STEP = 2**22  # tokens per step: Llama 2's (arXiv 2307.09288, section 2.2), and Llama 3's at first
SHARERS = 8  # maximum ranks per sequence of a step: Llama 3 405B trains on 2,048 sequences per step with 16,384 GPUs
PRECISION = "bf16"


@dataclass(frozen=True)
class Planned:
    """Run with its model. assumed: overrides that were added to the user's `words`."""

    run: Run
    words: tuple[str, ...]
    assumed: tuple[str, ...]
    model: tuple[Node, Plan]

    @property
    def world(self) -> int:
        return count_ranks(self.run)


def complete_words(words: Sequence[str]) -> Planned:
    """Return the run of `words`, with precision, sequence length, batch and strategy assumed if they are not named.

    A recipe or another run names all of them. Raises UserError for overrides that make no run. The layout is not
    checked.
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
    """Return `batch` with the sizes of a published pre-training for sizes that `names` leaves out.

    A microbatch is assumed only with a sequence length or a global batch: otherwise `train` finds its own.
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
    """Return `parallel=NAME` if the overrides name no strategy and the default one does not fit them, else ().

    The default does not fit if it lacks options that they set, or has no room for the ranks. Of the installed
    strategies that fit, the one with most layouts is chosen; of equals the first.
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
    """Return why this run is impossible, by its parts and its layout; None if it is possible."""
    try:
        problems = [problem for part in (run.model, *run.edits.values()) for problem in part.check(run)]
        problems += run.parallel.check(run) or find_layout_problems(run)
    except UserError as error:
        return error
    return UserError.of(problems) if problems else None


def explain(case: Planned, run: Run, cluster: Cluster) -> Explained:
    """Return the explanation of a run by its strategy. Raises UserError for a strategy that does not explain itself."""
    mesh = Mesh.of(run.parallel.size_axes(case.world))
    explanation = run.parallel.explain(run, mesh, case.model, cluster.topology)
    if explanation is None:
        raise UserError(
            "this parallel strategy does not say what it does.",
            "A plan is made of what `explain` of its configuration gives.",
            "parallel=single, parallel=ddp and those of gangline-parallel-megatron-style do.",
        )
    return replace(explanation, kernels=get_kernels(run))


def get_kernels(run: Run) -> Kernels:
    """Return how operations between matmuls run: in fused kernels if the blocks are compiled."""
    return "fused" if run.job.compile else "apart"
