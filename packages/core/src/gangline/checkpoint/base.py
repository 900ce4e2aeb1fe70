"""The checkpointer contract: keep and give back named global arrays and one JSON document."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, final

from gangline.checkpoint.id import CheckpointId
from gangline.run import attempts

if TYPE_CHECKING:
    from gangline.shard import Registry, Shard


class SaveFailed(Exception):
    """A save failed: the disk is full, the store is gone. What was saved before is untouched.

    Raised on every rank, by `Checkpointer.save` or by the futures of its handle.
    """

    def __init__(self, id: CheckpointId, why: str) -> None:
        self.id, self.why = id, why
        super().__init__(f"checkpoint {id} could not be saved: {why}")


@dataclass(frozen=True)
class SaveRequest:
    """What is asked of one save. The attempt that it belongs to is in the document, as all else that is kept."""

    step: int
    last: bool = False  # none follows, so it belongs where it lasts longest; a tier that has it already is no error
    deadline_seconds: float | None = None  # until the process is killed; None: it may take as long as it takes
    tiers: tuple[str, ...] = ()  # a part's own names of the places that it is for; (): all that there are
    record_waits: bool = False  # every step is kept: the record of this one is reported once its save is visible


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
    Each holds None or a SaveFailed. An error before the checkpoint is visible is in both, one of a later tier in
    `settled` alone. Ranks get the same outcome, at different times: a decision that all ranks must make alike waits
    until a future is done on every rank.
    """

    id: CheckpointId
    blocked_seconds: float = 0.0  # how long the step was held up
    visible: Future[None] = field(default_factory=Future)
    settled: Future[None] = field(default_factory=Future)
    measure: Callable[[], float] | None = None  # share of this rank's bytes that is written, all tiers together

    @property
    def state(self) -> SaveState:
        """Return the state of the save. Never raises."""
        if self.settled.done():
            return SaveState.FAILED if self.settled.exception() else SaveState.SETTLED
        return SaveState.VISIBLE if self.visible.done() and not self.visible.exception() else SaveState.WRITING

    @property
    def progress(self) -> float:
        """Return the share of this rank's bytes that is written."""
        return float(self.settled.done()) if self.measure is None else self.measure()

    def finish(self, error: SaveFailed | None = None) -> SaveHandle:
        """Resolve both futures, with None or an error; returns the handle."""
        if error is None:
            self.visible.set_result(None)
            self.settled.set_result(None)
        else:
            self.settled.set_exception(error)  # first: who sees the error in `visible` finds it in both
            self.visible.set_exception(error)
        return self


class Checkpointer(ABC):
    """Saves become visible all at once; what is visible is whole, and is never overwritten.

    `save` and `load` are called by all ranks. Reading (`list`, `document`) needs no process group.
    Construction may have collectives; `build(config, run, store)` gets the job's key-value store, or None where a tool
    opens a finished run.
    """

    keeps: bool = True  # false: nothing is ever kept (`checkpoint=off`), and the run does not ask for a save

    def get_due_save(self, step: int, seconds: float, every: str | int | None) -> SaveRequest | None:
        """What this rank asks for after this step, which took `seconds`; None: no save. Where any rank asks, all save.

        Asked once after each step, on every rank. `every` is the run's option; `auto` is for parts that override this.
        """
        return SaveRequest(step) if every is not None and step % int(every) == 0 else None

    def prepare(self, registry: Registry) -> None:
        """Steps are about to begin: what the first save would wait for may be made ready beside them."""

    @abstractmethod
    def save(
        self, request: SaveRequest, shards: Sequence[Shard], registry: Registry, document: dict[str, Any]
    ) -> SaveHandle:
        """Keep the arrays and the document (which names step and attempt); returns once they are staged.

        Waits until the save before it is visible. Ranks that asked for nothing pass `SaveRequest(step)`; where requests
        differ, rank 0's says which tiers. A save that has written all when it returns gives `SaveHandle(id).finish()`.
        Raises SaveFailed.
        """

    @abstractmethod
    def list(self) -> list[CheckpointId]:
        """Every whole checkpoint, oldest first."""

    @abstractmethod
    def read_document(self, id: CheckpointId) -> dict[str, Any]:
        """The JSON document of a checkpoint. Raises BadCheckpoint."""

    @abstractmethod
    def read_shapes(self, id: CheckpointId) -> dict[str, tuple[int, ...]]:
        """Names and global shapes of all that is stored."""

    @abstractmethod
    def load(self, id: CheckpointId, shards: Iterable[Shard], registry: Registry) -> None:
        """Fill the given shards in place, whatever layout wrote the arrays.

        A missing name or another shape is a UserError; damage raises BadCheckpoint, on every rank. Names left over are
        not an error here: sampling and export take the weights alone. Core refuses to resume from a checkpoint with
        arrays for which the run has no place, but for those that `Optimizer.may_drop` or `Callback.may_drop` gives up.
        """

    def find_latest(self) -> CheckpointId | None:
        """The newest whole checkpoint of the current attempt, else the one that the attempt started from.

        Never one of an abandoned branch; `gangline.run.attempts.find_latest` says which, from ``attempts.jsonl``.
        """
        return attempts.find_latest(self.run_dir, self.list())

    def is_lasting(self, id: CheckpointId) -> bool:
        """Whether a checkpoint outlives the job; one that does not is saved once more at the run's end."""
        return True

    def take_notices(self) -> Sequence[str]:
        """What people should know of what has happened since the last call; rank 0's are shown."""
        return ()

    @property
    @abstractmethod
    def run_dir(self) -> str:
        """The run directory whose attempts decide what is latest."""

    def close(self) -> None:
        """Wait for what is under way and let go of it."""
