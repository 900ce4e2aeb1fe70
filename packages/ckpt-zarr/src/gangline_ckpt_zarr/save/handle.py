"""One save under way, after the step has been let go: to the near tiers, then a copy from there to the durable one."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gangline.checkpoint.base import CheckpointId, Handle, SaveFailed
from gangline.errors import BadCheckpoint
from gangline.shard import Registry
from gangline_ckpt_zarr.agreement import Agreement
from gangline_ckpt_zarr.format import metadata
from gangline_ckpt_zarr.format.chunks import CheckpointFiles
from gangline_ckpt_zarr.save import delivery
from gangline_ckpt_zarr.save.delivery import Delivery, DeliveryPlan, Put
from gangline_ckpt_zarr.save.durable import DurableCopies
from gangline_ckpt_zarr.tiers.base import Tier


@dataclass(frozen=True)
class Content:
    """What zarr.json will say, beside the write id."""

    registry: Registry
    files: CheckpointFiles
    document: dict[str, Any]

    def text(self, write_id: str) -> bytes:
        return metadata.write(self.registry, self.files, self.document, write_id)


class Owner(delivery.Owner, Protocol):
    """What a save asks of its checkpointer."""

    copies: DurableCopies

    @property
    def ends(self) -> bool: ...


@dataclass(frozen=True)
class SaveTask:
    """What is to be saved where. `wanted`: of rank 0 it counts, and is the near tiers and perhaps the durable one.

    `again`: a tier that has the checkpoint already is no error but done.
    """

    id: CheckpointId
    wanted: Sequence[Tier]
    durable: Tier | None
    content: Content
    again: bool = False


class ZarrHandle(Handle):
    """The near tiers first: from then on the checkpoint is whole, the staging memory free, and the next save may begin.

    A copy to the durable tier goes on by itself. `poll` says that all is over, the copy too; `wait` returns when the
    near tiers have it, unless the run is at its end: then what is wanted is durable before it returns. After a `wait`
    that did not wait for the copy, `poll` does not either; if the copy then fails, the next save tells.
    """

    def __init__(
        self, owner: Owner, job: SaveTask, near: Agreement, far: Agreement, write: Put, copy: Put, source: Tier
    ) -> None:
        self.id, self.blocked_seconds = job.id, 0.0
        self._owner, self._job, self._far, self._copy_file, self._source = owner, job, far, copy, source
        self._near = Delivery(owner, job.id, near, self._plan, write, job.content.text, self._planned, self._near_whole)
        self._before: list[Delivery] = []  # copies of earlier saves that were under way when this one began
        self._failed_before: list[tuple[str, str]] = []  # (id, why) of those that nobody has been told of
        self._write_id, self._goes_far = "", False
        self._copy: Delivery | None = None
        self._failed: list[tuple[str, str]] = []  # what is raised, each time that it is asked for
        self._told = self._let_go = False

    def start(self, failed: str | None = None) -> None:
        """Let the save go on by itself; `failed`: why this rank could not stage."""
        self._near.start(failed)

    # --- the handle --------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> float:  # type: ignore[override]
        """Of this rank's bytes, all tiers together."""
        if self._copy is None:
            return self._near.progress / (1 + self._goes_far)
        return (self._near.progress + self._copy.progress) / 2

    @property
    def over(self) -> bool:
        """Whether the next save may begin: the near tiers have it, or it has failed."""
        return self._near.over

    def join(self) -> None:
        """Wait until the staging memory is free."""
        self._near.join()

    def poll(self) -> bool:
        if not self._near.over:
            return False
        if not self._failed and not self._told:
            own = [(str(self.id), self._near.why)] if self._near.why else []
            self._failed = own + self._failed_before
            if not self._failed and not self._let_go and all(copy.over for copy in self._copies):
                self._failed, self._told = self._owner.copies.tell(self._copies), True
        if self._failed:
            self._raise()
        return self._told or self._let_go

    def wait(self) -> None:
        self._near.join()
        if self._owner.ends:
            for copy in self._copies:
                copy.join()
            self._let_go = False
        if not self.poll():
            self._let_go = True

    @property
    def _copies(self) -> list[Delivery]:
        return self._before + ([] if self._copy is None else [self._copy])

    def _raise(self) -> None:
        (first, why), *others = self._failed
        id = CheckpointId.parse(first)
        assert id is not None
        more = (f"checkpoint {one} could not be saved: {so}" for one, so in others)
        raise SaveFailed(id, "; ".join([why, *more]))

    # --- the near tiers ----------------------------------------------------------------------------------------------

    def _plan(self) -> DeliveryPlan:
        """Of the near tiers; what is told of copies goes with it."""
        job, going = self._job, []
        done = job.again and self._source.has(job.id)  # then nothing nearer matters any more
        for tier in () if done else job.wanted:
            if tier is job.durable:
                continue
            if not tier.has(job.id):
                tier.clear()
                going.append(tier.name)
            elif not job.again:
                raise _there_already(tier, job.id)
        write_id = self._source.meta(job.id).write_id if done else secrets.token_hex(4)
        return DeliveryPlan(write_id, going, [job.durable in job.wanted, *self._owner.copies.split()])

    def _planned(self, plan: DeliveryPlan) -> None:
        self._write_id = plan.write_id
        self._goes_far, under_way, self._failed_before = plan.more
        self._before = self._owner.copies.keep(under_way)

    def _near_whole(self) -> None:
        if self._goes_far:
            plan, put, content = self._plan_copy, self._copy_file, self._content_there
            self._copy = Delivery(self._owner, self.id, self._far, plan, put, content)
            self._owner.copies.add(self._copy)
            self._copy.start()

    # --- the copy ----------------------------------------------------------------------------------------------------

    def _plan_copy(self) -> DeliveryPlan:
        durable = self._job.durable
        assert durable is not None
        if not durable.has(self.id):
            durable.clear()
            return DeliveryPlan(self._write_id, [durable.name])
        if not self._job.again:
            raise _there_already(durable, self.id)
        return DeliveryPlan(self._write_id, [])

    def _content_there(self, write_id: str) -> bytes:
        """zarr.json of the nearer tier, which must be what was put there. Raises BadCheckpoint."""
        content, file = self._source.content(self.id), f"{self._source.store.url}/{self.id}/{metadata.NAME}"
        if metadata.read(content, file).write_id != write_id:
            raise BadCheckpoint("every array", None, file, "it is of another save")
        return content


def _there_already(tier: Tier, id: CheckpointId) -> FileExistsError:
    return FileExistsError(f"{tier.store.url}/{id} is there already, and a checkpoint is never overwritten")
