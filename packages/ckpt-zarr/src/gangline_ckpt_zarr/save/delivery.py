"""Delivery of one checkpoint to tiers, one by one: each rank writes its file, ranks sync, zarr.json is written last.

So the checkpoint becomes visible atomically, after every rank's file is durable, and a kill at any moment leaves no
incomplete checkpoint that looks complete. The next save to a tier deletes the remains of killed saves.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from gangline.checkpoint.base import SaveFailed
from gangline.checkpoint.id import CheckpointId
from gangline.run.generation import hold
from gangline_ckpt_zarr.agreement import Agreement, Failed, StoreLost
from gangline_ckpt_zarr.errors import describe_error
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.save.task import SaveTask
from gangline_ckpt_zarr.tiers.base import Tier

Report = Callable[[float], None]  # called with the fraction of the file that is written


class DeliveryPlan(NamedTuple):
    """Decision of rank 0: the write id, the names of the target tiers, and whether a durable copy follows."""

    write_id: str
    tiers: list[str]
    copied: bool = False


class Delivery(ABC):
    """Delivery of one save, in a light thread: a writer process writes, and ranks sync through the job's store."""

    def __init__(self, task: SaveTask, agreement: Agreement) -> None:
        self.task, self.id, self.agreement = task, task.id, agreement
        self.done: Future[None] = Future()  # raises SaveFailed if the delivery failed
        self.progress = 0.0  # fraction of this rank's bytes that is written, over all tiers
        self._tiers: Sequence[Tier] = ()
        self._thread = threading.Thread(target=self._run, name=f"save {task.id}", daemon=True)

    # --- defined by subclasses ---------------------------------------------------------------------------------------

    @abstractmethod
    def plan(self) -> DeliveryPlan:
        """Return the write id and the tiers. Called on rank 0 alone. Raises FileExistsError, OSError, BadCheckpoint."""

    @abstractmethod
    def put(self, tier: Tier, write_id: str, report: Report) -> None:
        """Write this rank's file to a tier; it is durable on return. Raises OSError, BadCheckpoint."""

    @abstractmethod
    def get_metadata(self, write_id: str) -> bytes:
        """Return the content of zarr.json. Called on ranks that commit. Raises ValueError, OSError, BadCheckpoint."""

    @abstractmethod
    def list_protected(self) -> Collection[CheckpointId]:
        """Return other checkpoints that retention may not delete now."""

    def leaves_out(self, tier: Tier) -> bool:
        """Return whether to skip the tier because a rank could not write its file. Called after all have tried."""
        return False

    def finish_delivery(self, plan: DeliveryPlan) -> None:
        """Finish on every rank, once all tiers have the checkpoint."""

    # --- execution ---------------------------------------------------------------------------------------------------

    def start(self, failed: str = "") -> None:
        """Start the delivery. If `failed`, the reason why this rank has no bytes, the delivery fails on every rank."""
        if failed:
            self.agreement.fail(failed)
        self._thread.start()

    def end(self, why: str = "") -> None:
        """Resolve `done`; `why`: the reason of a failure, "" for success."""
        if why:
            self.done.set_exception(SaveFailed(self.id, why))
        else:
            self.done.set_result(None)

    def _run(self) -> None:
        write_id, why, late = "", "", False
        try:
            if self.agreement.rank == 0:
                self.agreement.publish("plan", self.plan())
            plan = DeliveryPlan(*self.agreement.wait_for("plan"))
            write_id = plan.write_id
            self._tiers = [tier for tier in self.task.tiers if tier.name in plan.tiers]
            for number, tier in enumerate(self._tiers):
                self._deliver(tier, write_id, number)
            self.progress = 1.0
            self.finish_delivery(plan)
        except Failed as failure:
            why, late = str(failure.what), failure.late
        except Exception as error:
            why, late = describe_error(error), isinstance(error, StoreLost)
            with contextlib.suppress(Exception):  # the job's store may be what failed
                self.agreement.fail(why, late)
        if why and write_id and not late:
            self._delete_own_files(write_id)
        self.end(why)

    def _deliver(self, tier: Tier, write_id: str, number: int) -> None:
        def report(share: float) -> None:
            self.progress = (number + share) / len(self._tiers)
            self.agreement.send_heartbeat()

        self.put(tier, write_id, report)
        self.agreement.mark_done(f"{tier.name} written")
        self.agreement.wait_for_all(f"{tier.name} written")
        if tier.left_out or self.leaves_out(tier):
            if self._tiers == [tier]:
                raise OSError(tier.left_out)
            tier.abandon(self.id, self.task.get_file_path(write_id, self.agreement.rank))
            return
        whole, publisher = f"{tier.name} whole {tier.scope}", f"the first rank of machine {tier.scope}"
        if tier.commits(self.agreement.rank):
            self.agreement.check()  # a rank whose wait timed out may have reported this save as failed
            with hold(self.task.run_dir):  # a rank that was cut off from the job commits nothing
                tier.store.commit(f"{self.id}/{NAME}", self.get_metadata(write_id))
            self.agreement.publish(whole, True)
            self._prune(tier)
        self.agreement.wait_for(whole, publisher if tier.scope else "rank 0")
        if tier.beside and self.agreement.rank == 0:
            self.agreement.wait_for(f"{tier.name} whole {tier.beside}", f"the first rank of machine {tier.beside}")
        tier.mark_saved(self.id)

    def _prune(self, tier: Tier) -> None:
        """Prune a tier. A failure is only a note: the new checkpoint is safe, so the run does not end."""
        try:
            tier.prune(self.task.run_dir, {self.id, *self.list_protected()})
        except OSError as error:
            self.task.notes.add(f"an old checkpoint in tier {tier.name} could not be deleted: {describe_error(error)}")

    def _delete_own_files(self, write_id: str) -> None:
        """Delete this rank's files of a failed save, to free space, except in tiers that have the complete checkpoint.

        Not called if a wait timed out or the job's store was lost: another rank may be about to commit the files that
        all ranks have written, and a checkpoint that looks complete must be complete. In this case the next save
        deletes the files.
        """
        for tier in self._tiers:
            try:
                if not tier.has(self.id):
                    tier.abandon(self.id, self.task.get_file_path(write_id, self.agreement.rank))
            except OSError as error:
                message = f"files of the failed save {self.id} could not be deleted"
                self.task.notes.add(f"{message}: {describe_error(error)}")


def make_exists_error(tier: Tier, id: CheckpointId) -> FileExistsError:
    """Return the error of a save to a tier that already has this checkpoint from another save."""
    return FileExistsError(f"{tier.store.url}/{id} exists already, and saves never overwrite a checkpoint")
