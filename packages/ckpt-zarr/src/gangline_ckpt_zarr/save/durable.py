"""The copies to the durable tier: one at a time, and every failure is reported.

Training waits for the near tiers alone, so a copy may outlive the handle of its save. All ranks must report the same
failures, or some would end a run with one more save than others; so rank 0 publishes with each save which copies were
still under way then, and which failures that save reports.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import final

from gangline import BadCheckpoint
from gangline.checkpoint.id import CheckpointId
from gangline_ckpt_zarr.agreement import Agreement
from gangline_ckpt_zarr.format import zarr_json
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.save.delivery import Delivery, DeliveryPlan, Report, there_already
from gangline_ckpt_zarr.save.task import SaveTask
from gangline_ckpt_zarr.save.transfer import copy_file
from gangline_ckpt_zarr.save.writer.client import WriterClient
from gangline_ckpt_zarr.stores.base import ObjectPath
from gangline_ckpt_zarr.tiers.base import Tier

_LOOK = 0.25  # seconds


@final
class DurableCopy(Delivery):
    """From the disk tier to the durable one, by a writer process of its own that checks every chunk on the way."""

    def __init__(self, task: SaveTask, agreement: Agreement, copier: WriterClient, copies: DurableCopies) -> None:
        super().__init__(task, agreement)
        self.write_id = ""  # of the save, known once its near tiers have it
        self._copier, self._copies = copier, copies

    def plan(self) -> DeliveryPlan:
        """To the durable tier, unless it has it. Raises FileExistsError, OSError."""
        durable = self.task.durable
        assert durable is not None, "a copy is made only where there is a durable tier"
        if not durable.has(self.id):
            durable.clear()
            return DeliveryPlan(self.write_id, [durable.name])
        if not self.task.again:
            raise there_already(durable, self.id)
        return DeliveryPlan(self.write_id, [])

    def put(self, tier: Tier, write_id: str, report: Report) -> None:
        file, path = self.task.file(self.agreement.rank), self.task.path(write_id, self.agreement.rank)
        if file.size:
            source, target = ObjectPath(self.task.disk.store.url, path), ObjectPath(tier.store.url, path)
            copy_file(self._copier, source, file, write_id, target, self.task.deadline_seconds, report)

    def metadata(self, write_id: str) -> bytes:
        """zarr.json of the disk tier, which must still be that of this save. Raises BadCheckpoint."""
        disk = self.task.disk
        content, file = disk.content(self.id), f"{disk.store.url}/{self.id}/{NAME}"
        if zarr_json.read(content, file).write_id != write_id:
            raise BadCheckpoint("every array", None, file, "it is of another save")
        return content

    def protected(self) -> Collection[CheckpointId]:
        return self._copies.sources()


@final
class DurableCopies:
    """Those of this rank that are under way, or whose end was not reported yet; oldest first."""

    def __init__(self, url: str) -> None:
        self._url = url  # of the durable tier
        self._all: tuple[DurableCopy, ...] = ()

    def add(self, copy: DurableCopy) -> None:
        """One more, about to start."""
        self._all += (copy,)

    def sources(self) -> Collection[CheckpointId]:
        """The checkpoints that are being copied, which must stay where they are copied from."""
        return {copy.id for copy in self._all if not copy.over}

    def join(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until none is under way; `waiting` is called every quarter of a second meanwhile."""
        for copy in self._all:
            while not copy.join(_LOOK):
                waiting()

    def status(self) -> tuple[list[str], list[tuple[str, str]]]:
        """(ids under way, (id, why) of those that failed), as rank 0 sees it and publishes it."""
        over = [copy for copy in self._all if copy.over]
        return [str(copy.id) for copy in self._all if copy not in over], self._failures(over)

    def keep(self, under_way: Sequence[str]) -> list[DurableCopy]:
        """Forget all but these ids, whose ends are still to be reported; gives their copies."""
        self._all = tuple(copy for copy in self._all if str(copy.id) in under_way)
        return [*self._all]

    def report(self, copies: Sequence[DurableCopy]) -> list[tuple[str, str]]:
        """(id, why) of those that failed among these, which are over; they are then forgotten."""
        self._all = tuple(copy for copy in self._all if copy not in copies)
        return self._failures(copies)

    def _failures(self, copies: Sequence[DurableCopy]) -> list[tuple[str, str]]:
        return [(str(copy.id), f"its copy to {self._url}: {copy.why}") for copy in copies if copy.why]
