"""Sparse upcycling: experts initialised as copies of a trained feed-forward (Komatsuzaki et al., arXiv 2212.05055).

The router is initialised randomly. If the weights of a token's experts add up to 1, the upcycled model starts with the
same outputs as the dense model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gangline import Problem, UserError
from gangline.plugin import registry
from gangline.run.directory import RunDirectory, holds_checkpoint
from gangline.shard import Layout, Registry, Shard

if TYPE_CHECKING:
    from gangline.checkpoint.base import Checkpointer
    from gangline.checkpoint.id import CheckpointId
    from gangline.config import Run
    from gangline_moe.config import MoeOptions

EXPERT = re.compile(r"(.*)\.experts\.((?:w_gate|w_up|w_down)\.weight)")


def find_upcycle_problems(options: MoeOptions, run: Run) -> list[Problem]:
    """Return problems of upcycling the run; [] for a resumed run, whose weights are in its own checkpoint."""
    if holds_checkpoint(run):
        return []
    where = f"moe.upcycle_from={options.upcycle_from}"
    try:
        source, _, _ = _open(str(options.upcycle_from))
    except UserError as error:
        return [Problem(f"{where}: {error.what}", *error.details[:2])]
    if "moe" in source.edits:
        return [
            Problem(
                f"{where}: that run has experts already.",
                "",
                "Continue that run: train resume=RUN_DIR, or train from=RUN_DIR for a new run.",
            )
        ]
    problems = []
    dense = options.get_dense_hidden(source)
    if options.ffn_dim not in (None, dense):
        what = f"moe.ffn_dim={options.ffn_dim} is not the feed-forward width of {options.upcycle_from}."
        problems.append(
            Problem(what, "Each expert starts as a copy of a feed-forward.", f"moe.ffn_dim={dense}, or null.")
        )
    if options.shared:
        what = f"moe.shared={options.shared} cannot be combined with moe.upcycle_from."
        problems.append(
            Problem(what, "A shared expert would add the output of the feed-forward a second time.", "moe.shared=0")
        )
    return problems


def _open(run_dir: str) -> tuple[Run, Checkpointer, CheckpointId]:
    """Return the dense run, checkpointer and newest checkpoint. Raises UserError if run or checkpoint is missing."""
    source = RunDirectory.open(run_dir).run()
    checkpointer: Checkpointer = registry.build(source.checkpoint, source, None)
    id = checkpointer.find_latest()
    if id is None:
        raise UserError(f"{run_dir} contains no checkpoint.")
    return source, checkpointer, id


def upcycle(run_dir: str, shards: Sequence[Shard]) -> None:
    """Fill this rank's shards from the newest checkpoint of a dense run; the router keeps its initial weights.

    Raises UserError if the two models differ in more than their experts.
    """
    import torch

    from gangline.mesh import Mesh

    _, checkpointer, id = _open(run_dir)
    stored_shapes = checkpointer.read_shapes(id)
    pairs: list[tuple[Shard, Shard]] = []
    for shard in shards:
        name, shape, offset = shard.name, tuple(shard.global_shape), tuple(shard.offset)
        if ".router." in name:
            continue
        expert = EXPERT.fullmatch(name)
        if expert is not None:
            name, shape, offset = f"{expert[1]}.{expert[2]}", shape[1:], offset[1:]
        if stored_shapes.get(name) != shape:
            what = f"{name}: shape {stored_shapes.get(name, 'missing')} in the checkpoint, {shape} in this run."
            raise UserError(f"moe.upcycle_from={run_dir}: the two models differ in more than their experts.", what)
        local = shard.local
        if expert is not None:
            local = torch.empty(local.shape[1:], dtype=local.dtype)
        pairs.append((shard, Shard(name, shape, local.dtype, offset, local)))
    layouts = {part.name: Layout(part.global_shape) for _, part in pairs}
    for shard, part in pairs:  # one at a time, so that memory holds at most one more expert
        checkpointer.load(id, [part], Registry.of(Mesh.of({}), {part.name: layouts[part.name]}))
        if part.local is not shard.local:
            shard.local.copy_(part.local.expand_as(shard.local))
