"""The checkpointer contract: keep and give back named global arrays and one JSON document."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gangline.checkpoint.id import CheckpointId
from gangline.run import attempts

if TYPE_CHECKING:
    from gangline.shard import Registry, Shard


class SaveFailed(Exception):
    """A save came to nothing: the disk is full, the store is gone. What was saved before is untouched.

    Raised on every rank, by `Checkpointer.save`, `Handle.poll` or `Handle.wait`.
    """

    def __init__(self, id: CheckpointId, why: str) -> None:
        self.id, self.why = id, why
        super().__init__(f"checkpoint {id} could not be saved: {why}")


@dataclass(frozen=True)
class SaveRequest:
    """What is asked of one save. The attempt that it belongs to is in the document, as all else that is kept."""

    step: int
    last: bool = False  # none follows, so it belongs where it lasts longest; where it is already there all is well
    deadline_seconds: float | None = None  # until the process is killed; None: it may take as long as it takes
    tiers: tuple[str, ...] = ()  # a part's own names of the places that it is for; (): all that there are
    record_waits: bool = False  # every step is kept: nobody is told of this one before its save is over


class Handle(ABC):
    """One save under way."""

    id: CheckpointId
    blocked_seconds: float  # how long the step was held up

    @property
    def progress(self) -> float:
        """The share of this rank's bytes that is written."""
        return 0.0

    @abstractmethod
    def poll(self) -> bool:
        """Whether the checkpoint is whole and visible; raises what went wrong."""

    @abstractmethod
    def wait(self) -> None:
        """Block until it is."""

    @property
    def over(self) -> bool:
        """Whether `wait` would return or raise at once. Never raises.

        Ranks ask until it is so, together, and so miss one that is lost meanwhile. Who cannot say answers True: the
        ranks then `wait`, each for itself.
        """
        return True

    @property
    def whole(self) -> bool:
        """Whether a run that is killed now would go on from this checkpoint: some place has all of it. Never raises."""
        try:
            return self.poll()
        except SaveFailed:
            return False


class Checkpointer(ABC):
    """Saves become visible all at once; what is visible is whole, and is never overwritten.

    `save` and `load` are called by all ranks. Reading (`list`, `document`) needs no process group.
    Construction may have collectives; `build(config, run, store)` gets the job's key-value store, or None where a tool
    opens a finished run.
    """

    keeps: bool = True  # false: nothing is ever kept (`checkpoint=off`), and the run does not ask for a save

    def due(self, step: int, seconds: float, every: str | int | None) -> SaveRequest | None:
        """What this rank asks for after this step, which took `seconds`; None: no save. Where any rank asks, all save.

        Asked once after each step, on every rank. `every` is the run's option; `auto` is for parts that override this.
        """
        return SaveRequest(step) if every is not None and step % int(every) == 0 else None

    def prepare(self, registry: Registry) -> None:
        """Steps are about to begin: what the first save would wait for may be made ready beside them."""

    @abstractmethod
    def save(
        self, request: SaveRequest, shards: Sequence[Shard], registry: Registry, document: dict[str, Any]
    ) -> Handle:
        """Keep the arrays and the document (which names step and attempt); returns once they are staged.

        Ranks that asked for nothing pass `SaveRequest(step)`; where requests differ, rank 0's says which tiers.
        Raises SaveFailed.
        """

    @abstractmethod
    def list(self) -> list[CheckpointId]:
        """Every whole checkpoint, oldest first."""

    @abstractmethod
    def document(self, id: CheckpointId) -> dict[str, Any]:
        """The JSON document of a checkpoint. Raises BadCheckpoint."""

    @abstractmethod
    def arrays(self, id: CheckpointId) -> dict[str, tuple[int, ...]]:
        """Names and global shapes of all that is stored."""

    @abstractmethod
    def load(self, id: CheckpointId, shards: Iterable[Shard], registry: Registry) -> None:
        """Fill the given shards in place, whatever layout wrote the arrays.

        A missing name or another shape is a UserError; damage raises BadCheckpoint, on every rank. Names left over are
        not an error here: sampling and export take the weights alone. Core refuses to resume from a checkpoint with
        weights or optimizer arrays that the run has no place for.
        """

    def latest(self) -> CheckpointId | None:
        """The newest whole checkpoint of the current attempt, else the one that the attempt started from.

        Never one of an abandoned branch; `gangline.run.attempts.latest` says which, from ``attempts.jsonl``.
        """
        return attempts.latest(self.run_dir, self.list())

    def lasts(self, id: CheckpointId) -> bool:
        """Whether a checkpoint outlives the job; one that does not is saved once more at the run's end."""
        return True

    def notices(self) -> Sequence[str]:
        """What people should know of what has happened since the last call; rank 0's are shown."""
        return ()

    @property
    @abstractmethod
    def run_dir(self) -> str:
        """The run directory whose attempts decide what is latest."""

    def close(self) -> None:
        """Wait for what is under way and let go of it."""
