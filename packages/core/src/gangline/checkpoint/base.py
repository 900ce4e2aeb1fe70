"""Checkpointers: the contract for saving and loading named global arrays and one JSON document of metadata."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, final

from gangline.checkpoint.id import CheckpointId
from gangline.run import attempts

if TYPE_CHECKING:
    from gangline.shard import Registry, Shard


class SaveFailed(Exception):
    """Error of a save, such as a full disk or a lost store. Earlier checkpoints are not changed.

    Raised on every rank, by `Checkpointer.save` or by the futures of the returned `SaveHandle`.
    """

    def __init__(self, id: CheckpointId, why: str) -> None:
        self.id, self.why = id, why
        super().__init__(f"checkpoint {id} could not be saved: {why}")


@dataclass(frozen=True)
class SaveRequest:
    """Options of one save. The attempt and other metadata are in the checkpoint's `Document`."""

    step: int
    last: bool = False  # last save of the run: write the most durable tier, even if another tier has this checkpoint
    deadline_seconds: float | None = None  # time until the process is killed; None: no limit
    tiers: tuple[str, ...] = ()  # tiers to write, by the checkpointer's own names; (): all tiers
    # True: core reports the step's record only once its save is visible, so no reported step is repeated (if every step
    # is saved)
    record_waits: bool = False


class SaveState(Enum):
    """State of a save: WRITING, then VISIBLE, then SETTLED. FAILED may follow either of the first two."""

    WRITING = "writing"  # no restore finds the checkpoint yet
    VISIBLE = "visible"  # a restore finds the checkpoint; other tiers are still being written
    SETTLED = "settled"  # every tier is written
    FAILED = "failed"  # a tier could not be written; `settled` holds the error


@final
@dataclass(eq=False)
class SaveHandle:
    """One save under way. The checkpointer resolves both futures, from any thread.

    visible  done when the checkpoint can be found and restored: its first tier is durable, and another save may begin
    settled  done when every tier is written and no work is left; never before `visible`
    Each future results in None or raises SaveFailed. An error before the checkpoint is visible is set on both
    futures, an error in a later tier only on `settled`. All ranks get the same outcome, but at different times: before
    a decision that must be equal on all ranks, wait until the future is done on every rank.
    """

    id: CheckpointId
    blocked_seconds: float = 0.0  # time for which `save` blocked the training step
    visible: Future[None] = field(default_factory=Future)
    settled: Future[None] = field(default_factory=Future)
    measure: Callable[[], float] | None = None  # () -> fraction of this rank's bytes written, over all tiers

    @property
    def state(self) -> SaveState:
        """State of the save. Never raises."""
        if self.error:
            return SaveState.FAILED
        if self.settled.done():
            return SaveState.SETTLED
        return SaveState.VISIBLE if self.visible.done() else SaveState.WRITING

    @property
    def error(self) -> SaveFailed | None:
        """Error of the save; None if it has not failed. An error of another type is returned as a SaveFailed."""
        for future in (self.visible, self.settled):
            error = None if not future.done() else CancelledError() if future.cancelled() else future.exception()
            if error is not None:
                why = f"{type(error).__name__}: {error}".removesuffix(": ")
                return error if isinstance(error, SaveFailed) else SaveFailed(self.id, why)
        return None

    @property
    def progress(self) -> float:
        """Fraction of this rank's bytes that is written, 0 to 1."""
        return float(self.settled.done()) if self.measure is None else self.measure()

    def finish(self, error: SaveFailed | None = None) -> SaveHandle:
        """Resolve both futures, with None or `error`; return the handle."""
        if error is None:
            self.visible.set_result(None)
            self.settled.set_result(None)
        else:
            self.settled.set_exception(error)  # first: code that sees `visible` done finds the error in both
            self.visible.set_exception(error)
        return self


class Checkpointer(ABC):
    """Contract of a checkpointer. A save becomes visible atomically: a visible checkpoint is complete and final.

    `save` and `load` are called by all ranks. Reading (`list`, `read_document`) needs no process group.
    The constructor may use collectives; `build(config, run, store)` gets the job's key-value store, or None in a tool
    that opens a finished run.
    """

    keeps: bool = True  # whether the checkpointer saves; False (`checkpoint=off`): the run requests no save

    def get_due_save(self, step: int, seconds: float, every: str | int | None) -> SaveRequest | None:
        """Return the save that this rank requests after `step`, which took `seconds`; None: no save.

        Called once after each step, on every rank; if any rank requests a save, all ranks save. every: the option
        `checkpoint.every`; only checkpointers that override this method support "auto".
        """
        return SaveRequest(step) if every is not None and step % int(every) == 0 else None

    def prepare(self, registry: Registry) -> None:
        """Start to prepare the first save, in the background. Called before the first step."""

    @abstractmethod
    def save(
        self, request: SaveRequest, shards: Sequence[Shard], registry: Registry, document: dict[str, Any]
    ) -> SaveHandle:
        """Save the arrays and the metadata `document` (with step and attempt); return when both are staged (copied).

        Waits until the previous save is visible. If only some ranks requested a save, core passes `SaveRequest(step)`
        on the others; rank 0's tiers are written. A save that is complete on return returns `SaveHandle(id).finish()`.
        Raises SaveFailed.
        """

    @abstractmethod
    def list(self) -> list[CheckpointId]:
        """Return the ids of all complete checkpoints, oldest first."""

    @abstractmethod
    def read_document(self, id: CheckpointId) -> dict[str, Any]:
        """Return the metadata of a checkpoint, the JSON of a `Document`. Raises BadCheckpoint."""

    @abstractmethod
    def read_shapes(self, id: CheckpointId) -> dict[str, tuple[int, ...]]:
        """Return the names and global shapes of all arrays of a checkpoint."""

    @abstractmethod
    def load(self, id: CheckpointId, shards: Iterable[Shard], registry: Registry) -> None:
        """Fill the given shards in place, from a checkpoint written under any layout.

        Raises UserError for a missing array or another shape, and BadCheckpoint, on every rank, for damage. Arrays of
        the checkpoint without a shard are ignored: sampling and export load only the weights. Core refuses to resume
        from a checkpoint with arrays that the run lacks, unless `Optimizer.may_drop` or `Callback.may_drop` allows it.
        """

    def find_latest(self) -> CheckpointId | None:
        """Return the newest complete checkpoint of the current attempt, else the checkpoint that it started from.

        `gangline.run.attempts.find_latest` chooses it from ``attempts.jsonl``, never from an abandoned branch.
        """
        return attempts.find_latest(self.run_dir, self.list())

    def is_lasting(self, id: CheckpointId) -> bool:
        """Return whether a checkpoint outlives the job; if False, the run saves again at its end."""
        return True

    def take_notices(self) -> Sequence[str]:
        """Return notices to the user since the last call, one per line; only rank 0's notices are shown."""
        return ()

    @property
    @abstractmethod
    def run_dir(self) -> str:
        """Run directory whose attempts.jsonl determines the latest checkpoint."""

    def close(self) -> None:
        """Wait for saves in progress, and free all resources."""
