"""Callbacks run at fixed points of a step, on every rank: averages of weights, evaluation, profiles, outer optimizers.

A callback is layout-invariant: its results are the same under every layout. Its arrays are sharded as the weights are
and saved in the checkpoint, and any layout loads them. Health checks (`gangline.health`) derive from it.
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


class Callback(ABC):  # noqa: B024  # each of its methods does nothing by default
    """Base of callbacks: core calls these methods on every rank, in this order; each does nothing by default.

    attach                                  once, after the optimizer is built and before a checkpoint is restored
    begin                                   before the first step of this start
    before_step, before_clip, after_step    each step
    before_validation, after_validation     after a step with a validation
    before_save, after_save                 after a step with a save
    end, or on_error                        once

    All ranks call each method at the same point, so it may use collectives, except in `on_error`. An exception ends the
    run with an error that names the callback: a rank that continued alone would leave the others waiting.

    place     "callback/ema", set by core before `attach`; names of its arrays begin with it and a slash
    registry  registry of all its arrays, equal on every rank; None if it has no arrays. Set by `attach`
    """

    place: str = ""
    registry: Registry | None = None

    # --- state --------------------------------------------------------------------------------------------------------

    def attach(
        self, runtime: Runtime, optimizer: Optimizer, comms: Comms, store: Store | None, device: torch.device
    ) -> None:
        """Store the built parts that the callback needs, and allocate its arrays, so that a load can fill them.

        store: the job's key-value store, for the callback's own threads; None in a run of one process.
        """

    def shards(self) -> Iterable[Shard]:
        """Return the arrays `<place>/...` that this rank holds. `allocate_like` makes some sharded like the weights."""
        return ()

    def fill_first_values(self, shards: Sequence[Shard], weights: Sequence[Shard]) -> None:
        """Fill the arrays that no checkpoint fills: all in a new run, those missing from the checkpoint on a resume.

        weights: this rank's `model/...` arrays as they are now. Unless overridden, an array `<place>/.../<parameter>`
        takes the values of that parameter, and other arrays do not change.
        """
        start_from_weights(shards, weights)

    def may_drop(self, names: Sequence[str]) -> Collection[str]:
        """Return the subset of `names` that a resume may drop; it refuses a checkpoint with any other, by name.

        names: the arrays `<place>/...` of the checkpoint that `registry` lacks. The result must be equal on all ranks.
        By default all: a callback may store less than before, such as one average of two. The run reports what is
        dropped. Arrays of a callback that the run no longer has are always dropped.
        """
        return names

    def state(self) -> dict[str, Any]:
        """Return the callback's state as JSON for the checkpoint; it must be equal on all ranks."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned.

        If the checkpoint has no state of this callback, core passes the result of `state` right after `attach`.
        """

    # --- events -------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Act before the first step of this start. step: number of steps done; weights and arrays are restored."""

    def before_step(self, step: int) -> None:
        """Act before each step. step: its number, counted from 1 as in the record."""

    def before_clip(self, parameters: Sequence[ShardedParam]) -> None:
        """Read or change the gradients of a step, before their norm is measured and clipped.

        parameters: `Runtime.parameters()`; each piece's `.grad` is the gradient of the global batch, and not finite in
        a skipped step. A change must be equal on all ranks that hold the same box, and equal in every
        layout. The `grad_norm` of the record is that of the changed gradients.
        """

    def after_step(self, record: StepRecord, applied: bool) -> Metrics | None:
        """Act after each step, before a save or rollback. Returned metrics are in its record as `<name>/<metric>`.

        applied: whether the optimizer stepped; False if the step was skipped. Metrics are numbers or lists of numbers
        and must be equal on all ranks: if not, the run ends with an error that names the callback. Each `.grad` is
        clipped.
        """

    def before_validation(self, step: int) -> None:
        """Act before held-out samples are evaluated."""

    def list_validated_weights(self) -> Sequence[str]:
        """Return the names of the callback's own sets of weights to be validated next to the run's weights.

        Name "0.999" means the arrays `<place>/0.999/<parameter>`, one for every trained parameter. Called at each
        validation; the result must be equal on all ranks. The loss is in the record's `validation_losses` as
        `<name>/0.999`, on a validation set as `<name>/0.999/<set>`.
        """
        return ()

    def after_validation(self, record: StepRecord) -> Metrics | None:
        """Act when the record has its validation losses. Metrics as in `after_step`."""

    def before_save(self, step: int) -> None:
        """Act before the arrays are saved."""

    def after_save(self, id: CheckpointId) -> None:
        """Act when the save is staged: arrays may change again. The save may still fail."""

    def end(self, why: str) -> None:
        """Act at the end, after the last save. why: "done", a signal's name, or the action that a verdict suggested."""

    def on_error(self, error: BaseException) -> None:
        """Act when this error ends the run on this rank. No collectives: the other ranks may be dead."""


def allocate_like(runtime: Runtime, prefix: str, dtype: torch.dtype | None = None) -> tuple[Registry, list[Shard]]:
    """Allocate an array `<prefix>/<parameter>` for every trained parameter, sharded like it: (registry, shards).

    Their values are not set: `Callback.fill_first_values` does that. dtype: None for that of the parameters.
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
    """Copy the values of a parameter into each array whose name ends with its name, if both have the same box."""
    import torch

    tensors = {(parse_parameter(weight.name), weight.box): weight.local for weight in weights}
    with torch.no_grad():
        for shard in shards:
            if (weight := tensors.get((shard.name.rpartition("/")[2], shard.box))) is not None:
                shard.local.copy_(weight)


__all__ = ["Callback", "Metrics", "allocate_like", "start_from_weights"]
