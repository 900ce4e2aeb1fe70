"""Build the runtime of a rank from a model on the meta device.

The steps: lay out the parameters, shard the modules, allocate and initialise the weights of this rank's shards, and
assign the modules to pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from gangline import UserError
from gangline.batch import Batch
from gangline.comm.base import Comm, Comms
from gangline.mesh import Mesh
from gangline.model.linear import Linear
from gangline.model.tree import Node, map_paths
from gangline.model.untraced import untraced
from gangline.plan import Plan
from gangline.precision import Precision
from gangline.runtime import Job
from gangline.shard import name_dtype, name_model_array
from gangline_basics.model.seams import get_calls, list_recomputed
from gangline_basics.parallel.prepare import bind_folds, finish_head, set_matmuls
from gangline_parallel_megatron_style.components import Components
from gangline_parallel_megatron_style.config import AxesConfig
from gangline_parallel_megatron_style.data_parallel.describe import describe
from gangline_parallel_megatron_style.data_parallel.options import BufferOptions
from gangline_parallel_megatron_style.data_parallel.storage import Storage
from gangline_parallel_megatron_style.pipeline.assignment import StageAssignment
from gangline_parallel_megatron_style.runtime import ComposedRuntime
from gangline_parallel_megatron_style.sharding.arrays import (
    ModelLayout,
    ModelShapes,
    lay_out,
    locate_part,
)
from gangline_parallel_megatron_style.sharding.ranks import find_active_fold
from gangline_parallel_megatron_style.tensor.apply import cut_modules
from gangline_parallel_megatron_style.tensor.sequence import cut_sequence, make_head_gatherer, make_sequence_reducer
from gangline_parallel_megatron_style.tensor.setting import Setting


def build(config: AxesConfig, job: Job) -> ComposedRuntime:
    """Build the runtime of the strategies `3d`, `fsdp`, `hsdp`, `tp` and `pp`."""
    run, plan, model, mesh, comms, precision = job.run, job.plan, job.model, job.mesh, job.comms, job.precision
    pp, tp, cp = (comms.get_comm(axis) for axis in ("pp", "tp", "cp"))
    # NCCL needs all ranks of a group in the group's first communication, but a pipeline transfer has only two
    if pp.size > 1:
        pp.all_reduce(torch.zeros(1, device=comms.device))
    sequence_parallel = config.sequence_parallel and tp.size > 1
    stages = StageAssignment(config, job.composed, mesh, comms.rank)
    model_shapes = describe(model, plan)
    width = probe_width(model, plan, stages.tree) if pp.size > 1 else None
    arrays = lay_out(
        plan,
        mesh,
        model_shapes,
        stages.ranks,
        zero=config.zero,
        sequence_parallel=sequence_parallel,
        dtype=name_dtype(precision.param_dtype),
    )
    setting: Setting | None = None
    if tp.size > 1:
        rows = find_first_rows(arrays, plan, mesh, comms.rank, model_shapes)
        setting = cut_modules(
            model,
            plan,
            tp,
            precision,
            sequence_parallel=sequence_parallel,
            first_rows=rows,
            losses=get_calls(stages.tree, plan, "loss"),
        )
    else:
        set_matmuls(model, plan, precision)
        if stages.splits:
            split_matmuls(model, precision)
    own_part, attentions = cut_context(config, model, plan, cp, stages.tree)
    bind_folds(model, plan, partial(get_fold_comm, plan, mesh, comms))
    each_microbatch = config.zero >= 2 and not run.deterministic
    reduction = None if run.gradients.plain else job.reduction
    options = BufferOptions(
        precision, comms.device, config.zero, each_microbatch, precision.reduce_dtype, reduction, config.offload
    )
    storage = Storage(model, plan, arrays, model_shapes, mesh, comms, options, run.deterministic)
    for index in stages.blocks:
        path = f"{plan.blocks}.{index}"
        job.finish(model.get_submodule(path), path)
    if stages.has_head:
        finish_head(model, plan, job.finish)
    segments = [stages.list_segments(model, chunk, arrays) for chunk in range(stages.chunks)]
    return ComposedRuntime(
        Components(
            model=model,
            mesh=mesh,
            comms=comms,
            precision=precision,
            storage=storage,
            stages=segments,
            seed=run.seed,
            deterministic=run.deterministic,
            sequence_parallel=sequence_parallel,
            own_part=own_part,
            own_tokens=partial(cut_sequence, comm=tp) if sequence_parallel else _as_it_is,
            over_sequence=_make_reducer(comms, *(("cp", "tp") if sequence_parallel else ("cp",))),
            for_all_heads=make_head_gatherer(tp, sequence_parallel) if tp.size > 1 else None,
            tokens_cut=tp.size if sequence_parallel else 1,
            width=width,
            prefetch=config.prefetch if config.zero == 3 else 0,
            listeners=stages.list_listeners(model),
            shapes={name: shape for name, shape in model_shapes.shapes.items() if name not in model_shapes.frozen},
            executor=partial(stages.make_executor, comm=pp, device=comms.device),
            records=stages.records,
            setting=setting,
            attentions=attentions,
            cached=not list_recomputed(stages.tree),
        )
    )


def cut_context(
    config: AxesConfig, model: nn.Module, plan: Plan, cp: Comm, tree: Node
) -> tuple[Callable[[Batch], Batch], list[tuple[nn.Module, Callable[..., Tensor]]]]:
    """Install context-parallel attention; return (function that splits a batch, replaced attention functions)."""
    if cp.size == 1:
        return _as_it_is, []
    from gangline_parallel_megatron_style.context.apply import ORDERS, set_attention
    from gangline_parallel_megatron_style.context.cut import cut_batch

    method = config.context
    attentions = set_attention(model, plan, cp, method, get_calls(tree, plan, "attention"))
    return partial(cut_batch, index=cp.index, size=cp.size, order=ORDERS[method]), attentions


def split_matmuls(model: nn.Module, precision: Precision) -> None:
    """Split the backward pass of every `Linear` into input and weight gradients, which may run at different times."""
    from gangline_parallel_megatron_style.pipeline.split_linear import split_linear

    for module in model.modules():
        if isinstance(module, Linear) and module.matmul == precision.linear:
            module.matmul = split_linear(precision)
            module.forward = untraced(module.forward)  # type: ignore[method-assign]


def find_first_rows(
    arrays: ModelLayout, plan: Plan, mesh: Mesh, rank: int, model_shapes: ModelShapes
) -> dict[str, int]:
    """Return, by name, the global index of this rank's first row of every parameter whose rows tp shards."""
    first_rows = {}
    for name in model_shapes.shapes:
        for division in arrays.registry[name_model_array(name)].divisions:
            if division.axes == ("tp",) and not division.rows and division.dim == 0:
                first_rows[name], _ = locate_part(division, mesh, mesh.coordinate(rank))
    return first_rows


def get_fold_comm(plan: Plan, mesh: Mesh, comms: Comms, name: str) -> Comm:
    """Return the communicator of a fold, or of this rank alone if the fold has one rank on this mesh."""
    from gangline.comm.solo import Solo

    fold = find_active_fold(plan, mesh, name)
    return Solo(name, comms.rank) if fold is None else comms.fold(fold)


class _Unread(dict):
    """Extra tensors of a placeholder batch; looking up any name raises `NotRead`."""

    class NotRead(Exception):
        """Raised when the embedding looks up an extra tensor of the batch."""

    def __missing__(self, name: str) -> Tensor:
        raise self.NotRead(name)


def probe_width(model: nn.Module, plan: Plan, tree: Node) -> int:
    """Return D of the hidden state (B, T, D) by a call of the embedding of a model on the meta device.

    If the embedding reads extra tensors of the batch (pixels), D is `dim` of the embedding's node in the model tree.
    Raises UserError if the node has no `dim`.
    """
    with torch.device("meta"):
        tokens = torch.zeros(1, 1, dtype=torch.int64)
        batch = Batch(tokens, tokens, tokens.bool(), tokens, tokens[0], extra=_Unread())
    try:
        with torch.no_grad():
            return model.get_submodule(plan.embed)(batch).shape[-1]
    except _Unread.NotRead as error:
        node = map_paths(tree)[plan.embed]
        width = getattr(node, "dim", None)
        if not isinstance(width, int):
            raise UserError(
                f"a pipeline needs the width of the hidden state, and {plan.embed} reads {str(error)!r} of the batch, "
                "so the width is unknown before the first batch.",
                f"Add the width as the field `dim` of the node {type(node).__name__}.",
            ) from None
        return width


def _make_reducer(comms: Comms, *axes: str) -> Callable[[Tensor], Tensor] | None:
    comm = comms.get_comm(*axes)
    return make_sequence_reducer(comm) if comm.size > 1 else None


def _as_it_is(x):
    return x
