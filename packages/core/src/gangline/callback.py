"""Callbacks act while a run lives, on every rank: averages of weights, evaluation, profiles, outer optimizers.

A callback is layout-invariant: what it makes of a step is the same whatever the layout. Its arrays are cut as the
weights are, travel in the checkpoint, and any layout reads them. Health checks (`gangline.health`) derive from it.
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
    """What core calls on every rank, in this order; each method does nothing unless it is overridden.

    attach                                  once, after the optimizer is built and before a checkpoint is restored
    begin                                   before the first step of this start
    before_step, before_clip, after_step    each step
    before_validation, after_validation     where the step is followed by one
    before_save, after_save                 where the step is followed by one
    end, or on_error                        once

    All ranks call it at the same place, so it may use collectives, but in `on_error`. What it raises ends the run and
    names it: a rank that went on alone would leave the others waiting.

    place     "callback/ema": set by core before `attach`; the names of its arrays begin with it and a slash
    registry  of its arrays, whole and the same on every rank; None where it has none. Set by `attach`
    """

    place: str = ""
    registry: Registry | None = None

    # --- state --------------------------------------------------------------------------------------------------------

    def attach(
        self, runtime: Runtime, optimizer: Optimizer, comms: Comms, store: Store | None, device: torch.device
    ) -> None:
        """The parts are built: keep what is needed of them, and allocate arrays, so that a load has what to fill.

        store: the job's key-value store, for threads of its own; None where one process is the run.
        """

    def shards(self) -> Iterable[Shard]:
        """The arrays `<place>/...` that this rank holds. `allocate_like` makes such as are cut like the weights."""
        return ()

    def fill_first_values(self, shards: Sequence[Shard], weights: Sequence[Shard]) -> None:
        """Fill those of its arrays that no checkpoint fills: all in a new run, those it lacks where one goes on.

        weights: this rank's `model/...` arrays as they are now. Unless overridden, an array `<place>/.../<parameter>`
        takes the values of that parameter, and others stay as they are.
        """
        start_from_weights(shards, weights)

    def may_drop(self, names: Sequence[str]) -> Collection[str]:
        """Return those of `names` that a resume may drop; a resume refuses a checkpoint with others, by name.

        names: the arrays `<place>/...` of the checkpoint that `registry` lacks. Equal on all ranks. By default all: a
        callback may keep less than before, as one average of two. A note says so. Arrays of a callback that the run no
        longer has are always left over.
        """
        return names

    def state(self) -> dict[str, Any]:
        """JSON that a checkpoint keeps; equal on all ranks."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave; of a checkpoint without it, what it gave right after `attach`."""

    # --- events -------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """`step` steps are done, weights and arrays are those of that step."""

    def before_step(self, step: int) -> None:
        """Step number `step`, counted from 1 as in the record, is about to be taken."""

    def before_clip(self, parameters: Sequence[ShardedParam]) -> None:
        """Read or change the gradients of a step, before their norm is measured and clipped.

        parameters: `Runtime.parameters()`; each piece's `.grad` is the gradient of the global batch, and not finite in
        a step that is left out. A change has to be equal on all ranks that hold the same box, and the same whatever the
        layout. The `grad_norm` of the record is that of the changed gradients.
        """

    def after_step(self, record: StepRecord, applied: bool) -> Metrics | None:
        """The step is done, nothing is saved or rolled back yet. Metrics come into its record as `<name>/<metric>`.

        applied: the optimizer stepped; false where the step was left out. Metrics are numbers or lists of numbers,
        equal on all ranks: the run ends with an error that names the callback where they are not. Each `.grad` is the
        clipped one.
        """

    def before_validation(self, step: int) -> None:
        """The held-out samples are about to be evaluated."""

    def list_lent_weights(self) -> Sequence[str]:
        """Which weights of its own are to be validated beside the run's: "0.999" for `<place>/0.999/<parameter>`.

        Asked at each validation, equal on all ranks; there must be an array for every trained parameter. Their loss is
        in the record's `validation_losses` as `<name>/0.999`, on a validation set as `<name>/0.999/<set>`.
        """
        return ()

    def after_validation(self, record: StepRecord) -> Metrics | None:
        """The record has its validation losses. Metrics as in `after_step`."""

    def before_save(self, step: int) -> None:
        """A checkpoint is about to be taken of what the arrays hold."""

    def after_save(self, id: CheckpointId) -> None:
        """It is staged: arrays may change again. Whether it becomes whole is known later."""

    def end(self, why: str) -> None:
        """No step follows, the last checkpoint is saved. why: "done", a signal's name, or what a verdict asked for."""

    def on_error(self, error: BaseException) -> None:
        """The run ends with this error on this rank; the others may live or not, so no collectives."""


def allocate_like(runtime: Runtime, prefix: str, dtype: torch.dtype | None = None) -> tuple[Registry, list[Shard]]:
    """New arrays `<prefix>/<parameter>` for every trained parameter, cut and placed as it is: (registry, shards).

    Their values are not set: `Callback.fill_first_values` does that. dtype: that of the parameters where it is None.
    """
    import torch

    from gangline.shard import Shard

    name = None if dtype is None else name_dtype(dtype)
    registry = runtime.registry.add_like(prefix, [name_model_array(parameter) for parameter in runtime.names()], name)
    shards = []
    for named in runtime.parameters():
        for piece in named.pieces:
            of = piece.shard
            local = torch.empty_like(piece.tensor, dtype=dtype or piece.tensor.dtype, requires_grad=False)
            shards.append(Shard(f"{prefix}/{named.name}", of.global_shape, local.dtype, of.offset, local, of.primary))
    return registry, shards


def start_from_weights(shards: Iterable[Shard], weights: Iterable[Shard]) -> None:
    """Give each array whose name ends with a parameter's the values of that parameter, where it has the same box."""
    import torch

    held = {(parse_parameter(weight.name), weight.box): weight.local for weight in weights}
    with torch.no_grad():
        for shard in shards:
            if (weight := held.get((shard.name.rpartition("/")[2], shard.box))) is not None:
                shard.local.copy_(weight)


__all__ = ["Callback", "Metrics", "allocate_like", "start_from_weights"]
