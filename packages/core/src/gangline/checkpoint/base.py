"""Checkpointers: the contract to save and load named global arrays and one JSON document."""

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
    """Error of a save: the disk is full, the store is gone. Earlier checkpoints are untouched.

    Raised on every rank, by `Checkpointer.save` or by the futures of its handle.
    """

    def __init__(self, id: CheckpointId, why: str) -> None:
        self.id, self.why = id, why
        super().__init__(f"checkpoint {id} could not be saved: {why}")


@dataclass(frozen=True)
class SaveRequest:
    """Options of one save. What a checkpoint stores next to its arrays, such as the attempt, is in the document."""

    step: int
    last: bool = False  # the run's last save, for the most durable tier; a tier that has it already is not an error
    deadline_seconds: float | None = None  # seconds until the process is killed; None: unlimited
    tiers: tuple[str, ...] = ()  # the checkpointer's own names of the tiers to write; (): all
    record_waits: bool = False  # every step is saved: the record of this one is reported once its save is visible


class SaveState(Enum):
    """State of a save: WRITING, then VISIBLE, then SETTLED. FAILED may follow either of the first two."""

    WRITING = "writing"  # no restore finds the checkpoint yet
    VISIBLE = "visible"  # a restore finds it; other tiers are still being written
    SETTLED = "settled"  # every tier is written
    FAILED = "failed"  # a tier could not be written; `settled` holds the error


@final
@dataclass(eq=False)
class SaveHandle:
    """One save under way. The checkpointer resolves both futures, from any thread.

    visible  done when the checkpoint can be found and restored: its first tier is durable, and another save may begin
    settled  done when every tier is written and nothing is left to do; never before `visible`
    Each holds None or a SaveFailed. An error before the checkpoint is visible is in both, an error of a later tier in
    `settled` alone. Ranks get the same outcome, at different times: a decision that all ranks must make alike waits
    until a future is done on every rank.
    """

    id: CheckpointId
    blocked_seconds: float = 0.0  # time that the save blocked the step
    visible: Future[None] = field(default_factory=Future)
    settled: Future[None] = field(default_factory=Future)
    measure: Callable[[], float] | None = None  # share of this rank's bytes that is written, all tiers together

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
        """Error of the save, None if it has not failed. An error of another type counts as a SaveFailed."""
        for future in (self.visible, self.settled):
            error = None if not future.done() else CancelledError() if future.cancelled() else future.exception()
            if error is not None:
                why = f"{type(error).__name__}: {error}".removesuffix(": ")
                return error if isinstance(error, SaveFailed) else SaveFailed(self.id, why)
        return None

    @property
    def progress(self) -> float:
        """Share of this rank's bytes that is written, 0 to 1."""
        return float(self.settled.done()) if self.measure is None else self.measure()

    def finish(self, error: SaveFailed | None = None) -> SaveHandle:
        """Resolve both futures, with None or an error; returns the handle."""
        if error is None:
            self.visible.set_result(None)
            self.settled.set_result(None)
        else:
            self.settled.set_exception(error)  # first: code that sees the error in `visible` finds it in both
            self.visible.set_exception(error)
        return self


class Checkpointer(ABC):
    """Contract of a checkpointer. A save becomes visible in one act: a visible checkpoint is complete, and is
    never overwritten.

    `save` and `load` are called by all ranks. Reading (`list`, `read_document`) needs no process group.
    Construction may use collectives; `build(config, run, store)` gets the job's key-value store, or None in a tool that
    opens a finished run.
    """

    keeps: bool = True  # false: it never saves (`checkpoint=off`), and the run does not request a save

    def get_due_save(self, step: int, seconds: float, every: str | int | None) -> SaveRequest | None:
        """Return the save that this rank requests after this step, which took `seconds`; None: no save.

        Called once after each step, on every rank; if any rank requests a save, all ranks save. every: the option
        `checkpoint.every`; "auto" is for checkpointers that override this.
        """
        return SaveRequest(step) if every is not None and step % int(every) == 0 else None

    def prepare(self, registry: Registry) -> None:
        """Prepare the first save in the background. Called before the first step."""

    @abstractmethod
    def save(
        self, request: SaveRequest, shards: Sequence[Shard], registry: Registry, document: dict[str, Any]
    ) -> SaveHandle:
        """Save the arrays and the document (which has step and attempt); return once they are staged.

        Waits until the previous save is visible. Ranks that requested no save pass `SaveRequest(step)`; if requests
        differ, the tiers are those of rank 0. A save that is complete on return returns `SaveHandle(id).finish()`.
        Raises SaveFailed.
        """

    @abstractmethod
    def list(self) -> list[CheckpointId]:
        """Return the ids of all complete checkpoints, oldest first."""

    @abstractmethod
    def read_document(self, id: CheckpointId) -> dict[str, Any]:
        """Return the JSON document of a checkpoint. Raises BadCheckpoint."""

    @abstractmethod
    def read_shapes(self, id: CheckpointId) -> dict[str, tuple[int, ...]]:
        """Return the names and global shapes of all arrays of a checkpoint."""

    @abstractmethod
    def load(self, id: CheckpointId, shards: Iterable[Shard], registry: Registry) -> None:
        """Fill the given shards in place, whatever layout wrote the arrays.

        A missing name or another shape is a UserError; damage raises BadCheckpoint, on every rank. Further arrays in
        the checkpoint are not an error here: sampling and export load the weights alone. Core refuses to resume from a
        checkpoint with arrays that the run lacks, except those of `Optimizer.may_drop` and `Callback.may_drop`.
        """

    def find_latest(self) -> CheckpointId | None:
        """Return the newest complete checkpoint of the current attempt, else the one that the attempt started from.

        Never one of an abandoned branch: `gangline.run.attempts.find_latest` chooses it, from ``attempts.jsonl``.
        """
        return attempts.find_latest(self.run_dir, self.list())

    def is_lasting(self, id: CheckpointId) -> bool:
        """Return whether a checkpoint outlives the job; if not, it is saved again at the end of the run."""
        return True

    def take_notices(self) -> Sequence[str]:
        """Return lines for the user on what happened since the last call; those of rank 0 are shown."""
        return ()

    @property
    @abstractmethod
    def run_dir(self) -> str:
        """Run directory whose attempts decide which checkpoint is the latest."""

    def close(self) -> None:
        """Wait for the saves under way, and free all resources."""
