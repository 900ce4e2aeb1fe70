"""Copies to the durable tier, one at a time: training waits only for saves to the nearer tiers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import wait
from typing import final

from gangline import BadCheckpoint
from gangline.checkpoint.id import CheckpointId
from gangline_ckpt_zarr.agreement import Agreement
from gangline_ckpt_zarr.format import zarr_json
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.save.delivery import Delivery, DeliveryPlan, Report, make_exists_error
from gangline_ckpt_zarr.save.task import SaveTask
from gangline_ckpt_zarr.save.transfer import copy_file
from gangline_ckpt_zarr.save.writer.client import WriterClient
from gangline_ckpt_zarr.stores.base import ObjectPath
from gangline_ckpt_zarr.tiers.base import Tier

_LOOK = 0.25  # seconds between two checks of a running copy


@final
class DurableCopy(Delivery):
    """Copy from the disk tier to the durable tier, by a separate writer process that checks every chunk it reads."""

    def __init__(self, task: SaveTask, agreement: Agreement, copier: WriterClient, copies: DurableCopies) -> None:
        super().__init__(task, agreement)
        self.write_id = ""  # write id of the save; set once the near tiers have the checkpoint, if a copy follows
        self._copier, self._copies = copier, copies

    def plan(self) -> DeliveryPlan:
        """Return the plan of the copy. If the durable tier already has the checkpoint, the plan has no target.

        Raises FileExistsError if the durable tier has the checkpoint and this is not the last save, OSError.
        """
        durable = self.task.durable
        assert durable is not None, "a durable copy needs a durable tier"
        if not durable.has(self.id):
            durable.clear()
            return DeliveryPlan(self.write_id, [durable.name])
        if not self.task.again:
            raise make_exists_error(durable, self.id)
        return DeliveryPlan(self.write_id, [])

    def put(self, tier: Tier, write_id: str, report: Report) -> None:
        file, path = (
            self.task.get_rank_file(self.agreement.rank),
            self.task.get_file_path(write_id, self.agreement.rank),
        )
        if file.size:
            source, target = ObjectPath(self.task.disk.store.url, path), ObjectPath(tier.store.url, path)
            copy_file(self._copier, source, file, write_id, target, self.task.deadline_seconds, report)

    def get_metadata(self, write_id: str) -> bytes:
        """Return zarr.json of the disk tier, which must still belong to this save. Raises BadCheckpoint."""
        disk = self.task.disk
        content, file = disk.read_content(self.id), f"{disk.store.url}/{self.id}/{NAME}"
        if zarr_json.read(content, file).write_id != write_id:
            raise BadCheckpoint("every array", None, file, "zarr.json belongs to another save")
        return content

    def list_protected(self) -> Collection[CheckpointId]:
        return self._copies.list_sources()

    def end(self, why: str = "") -> None:
        """Resolve `done`. An error of the copy gets the URL of the durable store; an earlier error is unchanged."""
        durable = self.task.durable
        super().end(f"the copy to {durable.store.url} failed: {why}" if why and self.write_id and durable else why)


@final
class DurableCopies:
    """This rank's running copies to the durable tier."""

    def __init__(self) -> None:
        self._all: tuple[DurableCopy, ...] = ()

    def add(self, copy: DurableCopy) -> None:
        """Add a copy that is about to start."""
        self._all = (*self._list_running(), copy)

    def list_sources(self) -> Collection[CheckpointId]:
        """Return the checkpoints that are being copied, which must stay in the disk tier until copied."""
        return {copy.id for copy in self._list_running()}

    def join(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until all copies are done; call `waiting` every quarter of a second during the wait."""
        for copy in self._all:
            while wait([copy.done], _LOOK).not_done:
                waiting()

    def _list_running(self) -> list[DurableCopy]:
        return [copy for copy in self._all if not copy.done.done()]
