"""Callbacks run at fixed points of a step, on every rank: averages of weights, evaluation, profiles, outer optimizers.

A callback is layout-invariant: its results are equal under every layout. Its arrays are sharded like the weights and
saved in the checkpoint, which any layout can load. Health checks (`gangline.health`) derive from `Callback`.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gangline.shard import name_dtype, name_model_array, parse_parameter

if TYPE_CHECKING:
    import torch

    from gangline.checkpoint.id import CheckpointId
    from gangline.comm.base import Comms, Store
    from gangline.optimizer import Optimizer
    from gangline.record import StepRecord
    from gangline.runtime import Runtime, ShardedParam
    from gangline.shard import Registry, Shard

Metrics = Mapping[str, "float | list[float]"]


class Callback(ABC):  # noqa: B024  # each method does nothing by default
    """Base class of callbacks. Core calls the methods on every rank, in this order; by default each does nothing.

    attach                                  once, after the optimizer is built and before a checkpoint is restored
    begin                                   before the first step of this start
    before_step, before_clip, after_step    each step
    before_validation, after_validation     after a step with a validation
    before_save, after_save                 after a step with a save
    end, or on_error                        once

    All ranks call a method at the same point, so every method except `on_error` may use collectives. An exception ends
    the run with an error that names the callback: a rank that continued alone would leave the other ranks waiting.
    """

    place: str = ""  # "callback/ema", set by core before `attach`; names of the callback's arrays begin with `<place>/`
    registry: Registry | None = None  # registry of its arrays, equal on every rank; None: no arrays. Set by `attach`

    # --- state --------------------------------------------------------------------------------------------------------

    def attach(
        self, runtime: Runtime, optimizer: Optimizer, comms: Comms, store: Store | None, device: torch.device
    ) -> None:
        """Store the built parts that the callback needs, and allocate its arrays, which a restore then fills.

        store: the job's key-value store, for the callback's own threads; None in a run of one process.
        """

    def shards(self) -> Iterable[Shard]:
        """Return this rank's shards of the arrays `<place>/...`, such as the shards from `allocate_like`."""
        return ()

    def fill_first_values(self, shards: Sequence[Shard], weights: Sequence[Shard]) -> None:
        """Fill `shards`: in a new run all arrays of the callback, on a resume arrays that the checkpoint lacks.

        weights: this rank's `model/...` shards with their current values. By default an array `<place>/.../<parameter>`
        gets the values of that parameter, and other arrays do not change.
        """
        start_from_weights(shards, weights)

    def may_drop(self, names: Sequence[str]) -> Collection[str]:
        """Return the arrays in `names` that a resume may drop; the resume fails if `names` has any other array.

        names: the arrays `<place>/...` of the checkpoint that `registry` lacks. The result must be equal on all ranks.
        By default all names: a callback may store less than before, such as one average instead of two. The run reports
        dropped arrays. Arrays of a callback that the run no longer has are always dropped.
        """
        return names

    def state(self) -> dict[str, Any]:
        """Return the callback's state as JSON for the checkpoint; it must be equal on all ranks."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned.

        If the checkpoint has no state of this callback, core passes the value of `state()` just after `attach`.
        """

    # --- events -------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Run before the first step of this start, after the restore. step: number of steps done."""

    def before_step(self, step: int) -> None:
        """Run before each step. step: number of the step, from 1, as `StepRecord.step`."""

    def before_clip(self, parameters: Sequence[ShardedParam]) -> None:
        """Read or change the gradients of a step, before their norm is measured and clipped.

        parameters: `Runtime.parameters()`. Each piece's `.grad` is the gradient of the global batch; in a skipped step
        it may be inf or nan. A change must be equal on all ranks that hold the same box, and under every layout. The
        `grad_norm` of the record is measured after the change.
        """

    def after_step(self, record: StepRecord, applied: bool) -> Metrics | None:
        """Run after each step, before a save or rollback. The record stores returned metrics as `<name>/<metric>`.

        applied: whether the optimizer stepped; False for a skipped step. Metrics are numbers or lists of numbers and
        must be equal on all ranks; otherwise the run ends with an error that names the callback. Each `.grad` is the
        clipped gradient.
        """

    def before_validation(self, step: int) -> None:
        """Run before a validation evaluates held-out samples. step: number of steps done."""

    def list_validated_weights(self) -> Sequence[str]:
        """Return the names of the callback's weight sets, which a validation evaluates after the run's weights.

        Name "0.999" means the arrays `<place>/0.999/<parameter>`, one for every trained parameter. Called at each
        validation; the result must be equal on all ranks. The record stores the loss in `validation_losses` as
        `<name>/0.999`, and the loss on a validation set as `<name>/0.999/<set>`.
        """
        return ()

    def after_validation(self, record: StepRecord) -> Metrics | None:
        """Run after a validation; `record` has the validation losses. Returns metrics as `after_step` does."""

    def before_save(self, step: int) -> None:
        """Run before the run's arrays are saved. step: number of steps done."""

    def after_save(self, id: CheckpointId) -> None:
        """Run after a save has copied (staged) the arrays, so they may change again. The save may still fail."""

    def end(self, why: str) -> None:
        """Run at the end, after the last save. why: "done", a signal's name, "stop" or "restart" (by a response)."""

    def on_error(self, error: BaseException) -> None:
        """Run when `error` ends the run on this rank. Must not use collectives: the other ranks may be dead."""


def allocate_like(runtime: Runtime, prefix: str, dtype: torch.dtype | None = None) -> tuple[Registry, list[Shard]]:
    """Allocate an array `<prefix>/<parameter>` for each trained parameter, sharded like it: (registry, shards).

    Values are uninitialized until `Callback.fill_first_values` sets them. dtype: None: the dtype of the parameter.
    """
    import torch

    from gangline.shard import Shard

    name = None if dtype is None else name_dtype(dtype)
    registry = runtime.registry.add_like(prefix, [name_model_array(parameter) for parameter in runtime.names()], name)
    shards = []
    for param in runtime.parameters():
        for piece in param.pieces:
            of = piece.shard
            local = torch.empty_like(piece.tensor, dtype=dtype or piece.tensor.dtype, requires_grad=False)
            shards.append(Shard(f"{prefix}/{param.name}", of.global_shape, local.dtype, of.offset, local, of.primary))
    return registry, shards


def start_from_weights(shards: Iterable[Shard], weights: Iterable[Shard]) -> None:
    """Copy each parameter into the arrays whose names end with the parameter's name, where both have the same box."""
    import torch

    tensors = {(parse_parameter(weight.name), weight.box): weight.local for weight in weights}
    with torch.no_grad():
        for shard in shards:
            if (weight := tensors.get((shard.name.rpartition("/")[2], shard.box))) is not None:
                shard.local.copy_(weight)


__all__ = ["Callback", "Metrics", "allocate_like", "start_from_weights"]
