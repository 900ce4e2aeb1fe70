"""Delivery from the staging memory to the near tiers, for which the next save waits."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import final

from gangline.checkpoint.id import CheckpointId
from gangline_ckpt_zarr.agreement import Agreement
from gangline_ckpt_zarr.save.delivery import Delivery, DeliveryPlan, Report, make_exists_error
from gangline_ckpt_zarr.save.durable import DurableCopies, DurableCopy
from gangline_ckpt_zarr.save.staging import Staging
from gangline_ckpt_zarr.save.task import SaveTask
from gangline_ckpt_zarr.save.transfer import write_file
from gangline_ckpt_zarr.save.writer.client import WriterClient
from gangline_ckpt_zarr.tiers.base import Tier


@final
class StagedDelivery(Delivery):
    """Delivery of the staged bytes to all wanted tiers except the durable tier; then it starts `copy`, if wanted."""

    def __init__(
        self, task: SaveTask, agreement: Agreement, writer: WriterClient, copy: DurableCopy, copies: DurableCopies
    ) -> None:
        super().__init__(task, agreement)
        self.staging: Staging | None = None
        self.no_memory = ""  # why this rank could not stage in the memory tier
        self.copy, self._copies = copy, copies
        self._writer = writer

    def plan(self) -> DeliveryPlan:
        """Return the plan: near tiers that lack the checkpoint. Raises FileExistsError, OSError, BadCheckpoint."""
        task, going = self.task, []
        done = task.again and task.disk.has(self.id)  # then no save to the memory tier is needed
        for tier in () if done else task.wanted:
            if tier is task.durable or tier.left_out:
                continue
            if not tier.has(self.id):
                tier.clear()
                going.append(tier.name)
            elif not task.again:
                raise make_exists_error(tier, self.id)
        if not going and not done and (why := next((tier.left_out for tier in task.wanted if tier.left_out), "")):
            raise OSError(why)
        write_id = task.disk.read_meta(self.id).write_id if done else secrets.token_hex(4)
        return DeliveryPlan(write_id, going, task.copied)

    def compute_total_progress(self) -> float:
        """Return the fraction of this rank's bytes that is written, over all tiers."""
        return (self.progress + self.copy.progress) / 2 if self.task.copied else self.progress

    def put(self, tier: Tier, write_id: str, report: Report) -> None:
        file, path = (
            self.task.get_rank_file(self.agreement.rank),
            self.task.get_file_path(write_id, self.agreement.rank),
        )
        if self.no_memory and tier.get_target(path) is None:
            if self.agreement.count("no memory", 1) == 1:
                self.agreement.publish("first without memory", self.no_memory)
            return
        if file.size:
            self.agreement.check()
            assert self.staging is not None, "the save fails on a rank that cannot stage"
            target, deadline = tier.get_target(path), self.task.deadline_seconds
            write_file(self._writer, self.staging, file, write_id, target, deadline, report)
            tier.adopt(self.staging, self.id, path)
            if not self.task.again:  # the last save has no time for copies to other nodes, and is also on disk
                self._copy(tier, path)

    def _copy(self, tier: Tier, path: str) -> None:
        why = tier.copy(self.id, path, self.task.deadline_seconds, self.agreement.send_heartbeat)
        if why and self.agreement.count("not copied", 1) == 1:
            self.agreement.publish("first not copied", [tier.name, why])

    def leaves_out(self, tier: Tier) -> bool:
        if tier.get_target("") is not None or not self.agreement.count("no memory", 0):
            return False
        tier.left_out = self.agreement.wait_for("first without memory")
        if self.agreement.rank == 0:
            self.task.notes.add(
                f"saves skip the memory tier until the ranks restart: {tier.left_out}. Checkpoints are saved only to "
                f"disk. Enlarge /dev/shm (docker run --shm-size), or set checkpoint.memory_every=null"
            )
        return True

    def get_metadata(self, write_id: str) -> bytes:
        return self.task.encode_metadata(write_id)

    def list_protected(self) -> Collection[CheckpointId]:
        return self._copies.list_sources()

    def finish_delivery(self, plan: DeliveryPlan) -> None:
        if self.agreement.rank == 0 and (number := self.agreement.count("not copied", 0)):
            tier, why = self.agreement.wait_for("first not copied")
            ranks = f"{number} rank{'s' * (number > 1)}"
            self.task.notes.add(f"checkpoint {self.id} in {tier}: files of {ranks} not copied to other nodes: {why}")
        if plan.copied:
            self.copy.write_id = plan.write_id
            self._copies.add(self.copy)

    def end(self, why: str = "") -> None:
        """Resolve `done` of the near tiers and start the copy; without a copy, resolve `done` of the copy as well."""
        if why:  # before `done`, so that a caller who gets the error from `done` also gets it from `copy.done`
            self.copy.end(why)
        super().end(why)
        if self.copy.write_id:
            self.copy.start()
        elif not why:
            self.copy.end()
