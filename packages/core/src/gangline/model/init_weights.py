"""Initial weights of a run, complete or some shards: drawn or pretrained."""

from __future__ import annotations

from collections.abc import Iterable

from gangline.config.schema import Run
from gangline.model.build import construct
from gangline.model.init import initialise, list_shards
from gangline.model.pretrained import find_pretrained
from gangline.model.tree import Node
from gangline.plan import Plan
from gangline.shard import Shard, parse_parameter


def check_pretrained_names(run: Run, tree: Node, plan: Plan) -> None:
    """Raise UserError if the directory of the pretrained weights contains a tensor that the model lacks."""
    if (directory := run.model.get_weights_directory()) is None:
        return
    shards = list_shards(construct(tree), plan)  # shards of the complete model, not of this rank
    shapes = {parse_parameter(shard.name): shard.global_shape for shard in shards}
    find_pretrained(run.model).check_names(directory, plan, shapes)


def draw_weights(run: Run, shards: Iterable[Shard], plan: Plan) -> None:
    """Fill shards with initial weights, drawn or from the model's directory; then let the edits fill their weights."""
    directory, shards = run.model.get_weights_directory(), list(shards)
    if directory is None:
        initialise(shards, plan, run.seed)
    else:
        find_pretrained(run.model).load(directory, shards, plan, run.seed)
    for options in run.edits.values():
        options.fill_init_weights(run, shards, plan)
