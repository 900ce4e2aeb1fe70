"""From words to a run that can be planned: what the words leave open and a plan needs is assumed, and said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from gangline import UserError
from gangline.cluster import Cluster
from gangline.config import ParallelConfig, Run, compose_one, layout_problems, meaningless, world_of
from gangline.explain import Explained, Kernels
from gangline.model import Node, Plan, compose_model
from gangline.plugins import installed
from gangline.strategy import Mesh

# What a run of unknown batch is taken to be: Llama 3 405B's, 16.8 M tokens a step (arXiv 2407.21783, table 4).
USUAL = {"batch.sequence_length": "8192", "batch.global_size": "2048", "batch.micro_size": "1", "precision": "bf16"}


@dataclass(frozen=True)
class Planned:
    """A run with its model at hand. assumed: words that were added to the user's."""

    run: Run
    words: tuple[str, ...]
    assumed: tuple[str, ...]
    model: tuple[Node, Plan]

    @property
    def world(self) -> int:
        return world_of(self.run)


def planned(words: Sequence[str]) -> Planned:
    """Raises UserError for words that make no run; whether its layout fits is `problems`' to say."""
    given = {word.lstrip("+").partition("=")[0] for word in words}
    alone = not given & {"recipe", "from", "resume"}
    takes = alone and not any(name.startswith("batch.") for name in given)
    assumed = tuple(f"{name}={value}" for name, value in USUAL.items() if takes and name not in given)
    if alone and "parallel" not in given:
        assumed += strategy(words)
    run = compose_one([*words, *assumed])
    if problems := meaningless(run):
        raise UserError.of(problems)
    return Planned(run, tuple(words), assumed, compose_model(run))


def strategy(words: Sequence[str]) -> tuple[str, ...]:
    """`parallel=NAME` where the words name no strategy, and the one that a run has by default lacks options that they
    set, or has not room for the ranks: of the installed ones that can, that with most layouts, of equals the first.
    """
    names = {word: word.lstrip("+").partition("=")[0].split(".") for word in words}
    options = {name[1] for name in names.values() if name[0] == "parallel" and len(name) > 1}
    run = compose_one([word for word, name in names.items() if name[0] != "parallel"])
    if meaningless(run) or _has_room(run.parallel, options, world_of(run)):
        return ()
    found: dict[str, int] = {}
    for name, offer in installed().offers("parallel").items():
        config = offer.part.config()
        world = run.launch.processes or config.world(0)
        if _has_room(config, options, world):
            found[name] = sum(1 for _ in config.layouts(replace(run, parallel=config), world))
    return (f"parallel={max(found, key=found.__getitem__)}",) if found else ()


def _has_room(config: ParallelConfig, options: set[str], world: int) -> bool:
    try:
        return options <= {item.name for item in fields(config)} and bool(config.axes(world) or world == 1)
    except UserError:
        return False


def refused(run: Run) -> UserError | None:
    """Why this run cannot be: what its parts and its layout say against it."""
    try:
        problems = [problem for part in (run.model, *run.edits.values()) for problem in part.check(run)]
        problems += run.parallel.check(run) or layout_problems(run)
    except UserError as error:
        return error
    return UserError.of(problems) if problems else None


def explain(case: Planned, run: Run, cluster: Cluster) -> Explained:
    """Raises UserError for a strategy that does not explain itself."""
    mesh = Mesh.of(run.parallel.axes(case.world))
    found = run.parallel.explain(run, mesh, case.model, cluster.topology)
    if found is None:
        raise UserError(
            "this parallel strategy does not say what it does.",
            "A plan is made of what `explain` of its configuration gives.",
            "parallel=single, parallel=ddp and those of gangline-parallel-megatron-style do.",
        )
    return replace(found, kernels=kernels_of(run))


def kernels_of(run: Run) -> Kernels:
    """How the operations between products run: in fused kernels where the blocks are compiled."""
    return "fused" if run.run.compile else "apart"
