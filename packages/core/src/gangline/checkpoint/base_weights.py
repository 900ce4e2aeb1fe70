"""Base weights: parameters that a plan freezes and checkpoints may leave out (`checkpoint.save_frozen=false`).

Base weights are a function of the run: drawn by the run's seed, or read from `model.weights`. A checkpoint without base
weights records their layout-invariant fingerprint. A reader recreates the base weights and refuses a different result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gangline.checkpoint.array_sums import compute_digest, compute_fingerprint, sum_of
from gangline.errors import UserError
from gangline.model.tree import get_parameter_shapes
from gangline.shard import Shard, name_model_array, parse_parameter

if TYPE_CHECKING:
    import torch

    from gangline.comm.base import Comms
    from gangline.config.schema import Run
    from gangline.model.tree import Node
    from gangline.plan import Plan

Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[Shapes], Iterator[tuple[str, "torch.Tensor"]]]  # a tensor is valid until the next one is read
Record = Mapping[str, Any]  # `Document.base`: metadata of base weights that a checkpoint leaves out


class BaseWeights:
    """Base weights of a run, which saves leave out and a restore recreates.

    arrays    name -> shape of each base weight, in order of name. Buffers are not base weights: they are always saved
    left_out  names of the base weights that saves leave out; empty before `leave_out`
    record    metadata of the base weights in saves that leave them out (`Document.base`)
    """

    def __init__(self, run: Run, tree: Node, plan: Plan, comms: Comms | None = None) -> None:
        frozen_shapes = (
            (name, shape) for name, shape in sorted(get_parameter_shapes(tree).items()) if plan.is_frozen(name)
        )
        self.arrays: Shapes = {name_model_array(name): shape for name, shape in frozen_shapes}
        self.left_out: frozenset[str] = frozenset()
        self.record: dict[str, Any] = {}
        self._run, self._plan, self._comms = run, plan, comms

    # --- saves -------------------------------------------------------------------------------------------------------

    def leave_out(self, shards: Sequence[Shard], stored: Collection[str]) -> None:
        """Leave the base weights out of all later saves. Called by all ranks. shards: the run's `model/...` shards.

        stored: names of the arrays in the checkpoint that the run resumed from. If it contains base weights, they are
        first recreated, one by one, because the next save may delete the only copy. Raises UserError if they differ.
        """
        now = compute_fingerprint(self.arrays, shards, self._comms)
        if len(self.find_missing(stored)) < len(self.arrays):
            self._refuse_lost(now, [shard for shard in shards if shard.name in self.arrays])
        self.left_out = frozenset(self.arrays)
        self.record = {"fingerprint": now, "arrays": len(self.arrays), "from": self._run.model.get_weights_directory()}

    def _refuse_lost(self, wanted: str, shards: Iterable[Shard]) -> None:
        import torch

        came = self._run.model.get_weights_directory()
        remedy = "To save the frozen weights in every checkpoint:  checkpoint.save_frozen=true"
        complaint = "checkpoint.save_frozen=false: the frozen base weights of this run cannot be recreated"
        copies = (replace(shard, local=torch.empty_like(shard.local)) for shard in shards)
        now = compute_fingerprint(
            self.arrays, (self._draw([copy], complaint, remedy)[0] for copy in copies), self._comms
        )
        if now != wanted:
            where = f"are now in {came}" if came else "the run's seed draws now"
            raise UserError(
                f"checkpoint.save_frozen=false: the base weights of this run differ from the weights that {where}.",
                f"Fingerprint {wanted} in the checkpoint, {now} recreated: later checkpoints could not be resumed.",
                remedy,
            )

    # --- checkpoints without base weights ----------------------------------------------------------------------------

    def find_missing(self, stored: Collection[str]) -> Shapes:
        """Return the base weights that are missing in the `stored` arrays of a checkpoint."""
        return {name: shape for name, shape in self.arrays.items() if name not in stored}

    def fill(self, shards: Sequence[Shard], stored: Collection[str], record: Record, checkpoint: str) -> list[Shard]:
        """Fill the base weights that a checkpoint leaves out; return the shards that the checkpoint has.

        Called by all ranks. Base weights that this run itself left out are already set. checkpoint: name in errors.
        Raises UserError if base weights cannot be recreated, or differ from those that the run was trained with.
        """
        missing = self.find_missing(stored)
        if missing and record.get("fingerprint") != self.record.get("fingerprint", ""):
            _refuse_silent(missing, record, checkpoint)
            weights = self._draw([s for s in shards if s.name in missing], *_explain_unreadable(record, checkpoint))
            _refuse_other(compute_fingerprint(missing, weights, self._comms), record, checkpoint)
        return [shard for shard in shards if shard.name not in missing]

    def complete(
        self, arrays: Shapes, read: Read, record: Record, checkpoint: str
    ) -> tuple[Shapes, Read, Callable[[], None]]:
        """Return `arrays` and `read`, both with the base weights that the checkpoint lacks, and a function `check`.

        Base weights are recreated one array at a time, because all may not fit into memory. Call `check` after all
        reads: it recreates the arrays that were not read, and raises UserError as `fill` does.
        """
        missing = self.find_missing(arrays)
        if not missing:
            return arrays, read, lambda: None
        _refuse_silent(missing, record, checkpoint)
        sums: dict[str, int] = {}

        def draw(name: str) -> torch.Tensor:
            import torch

            codes = self._plan.get_dtype(parse_parameter(name)) == "int8"
            local = torch.empty(missing[name], dtype=torch.int8 if codes else torch.float32)
            shard = Shard(name, missing[name], local.dtype, (0,) * local.dim(), local)
            self._draw([shard], *_explain_unreadable(record, checkpoint))
            if name not in sums:
                sums[name] = int(sum_of(shard))
            return local

        def read_all(wanted: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
            yield from read({name: shape for name, shape in wanted.items() if name not in missing})
            for name in (name for name in wanted if name in missing):
                yield name, draw(name)

        def check() -> None:
            for name in missing:
                if name not in sums:
                    draw(name)
            _refuse_other(compute_digest(sums), record, checkpoint)

        return {**arrays, **missing}, read_all, check

    def _draw(self, shards: Sequence[Shard], failed: str, remedy: str) -> Sequence[Shard]:
        """Fill shards with the run's initial weights. Raises UserError whose message begins with `failed`."""
        from gangline.model.init_weights import draw_weights

        try:
            draw_weights(self._run, shards, self._plan)
        except UserError as error:
            raise UserError(f"{failed}: {error.what}", *error.details, remedy) from error
        return shards


def _refuse_silent(missing: Iterable[str], record: Record, checkpoint: str) -> None:
    if not record:
        names = ", ".join(map(parse_parameter, sorted(missing)[:3]))
        raise UserError(f"{checkpoint} lacks frozen weights: {names}.", "The metadata does not record the reason.")


def _explain_unreadable(record: Record, checkpoint: str) -> tuple[str, str]:
    """Return (first line, last line) of the error for base weights of a checkpoint that cannot be recreated."""
    return f"the frozen base weights that {checkpoint} leaves out cannot be recreated", _format_origin(record)


def _refuse_other(now: str, record: Record, checkpoint: str) -> None:
    if now != record.get("fingerprint"):
        came = record.get("from")
        raise UserError(
            f"{checkpoint} was trained with frozen base weights that differ from the current base weights.",
            f"Fingerprint {record.get('fingerprint')} in the checkpoint, {now} now. {_format_origin(record)}",
            f"Restore the weights in {came} from a copy." if came else "The initialization of the model has changed.",
        )


def _format_origin(record: Record) -> str:
    return f"Base weights from {record['from']}." if record.get("from") else "Base weights drawn by run.seed."
