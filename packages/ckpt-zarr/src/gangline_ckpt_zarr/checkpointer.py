"""`checkpoint=zarr`: the checkpointer that a run uses."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from gangline.checkpoint.base import Checkpointer, CheckpointId, Handle
from gangline.errors import BadCheckpoint, UserError
from gangline_ckpt_zarr.agreement import Agreement
from gangline_ckpt_zarr.errors import describe_error
from gangline_ckpt_zarr.format.metadata import Meta, data_path
from gangline_ckpt_zarr.load.nearest import unreadable
from gangline_ckpt_zarr.load.shards import load
from gangline_ckpt_zarr.save.buffers import Buffers
from gangline_ckpt_zarr.save.durable import DurableCopies
from gangline_ckpt_zarr.save.handle import Content, SaveTask, ZarrHandle
from gangline_ckpt_zarr.save.interval import Interval, observed_mtbf
from gangline_ckpt_zarr.save.transfer import Report, copy_file, fair, write_file
from gangline_ckpt_zarr.save.writer.client import WriterClient
from gangline_ckpt_zarr.save.writer.messages import ObjectPath
from gangline_ckpt_zarr.tiers.base import Tier, disk_tiers
from gangline_ckpt_zarr.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from gangline.comm import Store
    from gangline.config.schema import Run
    from gangline.shard import Registry, Shard
    from gangline_ckpt_zarr.config import ZarrCheckpoint


class ZarrCheckpointer(Checkpointer):
    """Saves beside training, tier by tier; loads from the nearest tier that has a good copy.

    A save that wants the durable tier waits until no copy to it is under way; others do not.
    """

    def __init__(self, run: Run, tiers: Sequence[Tier], store: Store | None, config: ZarrCheckpoint) -> None:
        assert run.run.dir is not None, "a run has its directory before it has a checkpointer"
        self._run_dir, self._steps, self.tiers, self.store = run.run.dir, run.steps, tiers, store
        self.memory = next((tier for tier in tiers if isinstance(tier, MemoryTier)), None)
        self.disk = next(tier for tier in tiers if tier.name == "disk")
        self.durable = next((tier for tier in tiers if tier.name == "durable"), None)
        self.config = config
        self._notices: list[str] = []
        self._number = 0  # of saves and loads: all ranks count the same
        self._asked: tuple[int, Sequence[Tier]] = (-1, ())  # by `due`: the step, and the tiers that want it
        self._last = False
        self._saving: ZarrHandle | None = None
        self._writer, self._copier = WriterClient(), WriterClient()
        self.copies = DurableCopies("" if self.durable is None else self.durable.store.url)
        self._buffers = Buffers(self.memory, self._writer)
        mtbf = observed_mtbf(self._run_dir) if config.mtbf_hours is None else config.mtbf_hours * 3600
        self._interval = Interval(mtbf) if config.every == "auto" else None

    @property
    def run_dir(self) -> str:
        return self._run_dir

    # --- when --------------------------------------------------------------------------------------------------------

    def due(self, step: int, seconds: float, every: str | int | None) -> bool:
        wanted = []
        if step == self._steps and self.config.at_end:
            wanted = [*self.tiers]
        elif self._near_due(step, seconds, every):
            wanted = [
                tier for tier in self.tiers if tier is self.memory or tier.every is None or step % tier.every == 0
            ]
        elif self.memory is not None and self.memory.every is not None and step % self.memory.every == 0:
            wanted = [self.memory]
        self._asked = step, wanted
        return bool(wanted)

    def _near_due(self, step: int, seconds: float, every: str | int | None) -> bool:
        """With `auto` rank 0 decides: only its clock counts."""
        if self._interval is None:
            return super().due(step, seconds, every)
        saving = self._saving is not None and not self._saving.over
        return self._interval.due(seconds, saving, copying=bool(self.copies.held())) and _rank() == 0

    def ending(self) -> None:
        self._last = True

    # --- save --------------------------------------------------------------------------------------------------------

    def prepare(self, registry: Registry) -> None:
        if self.config.every is not None or self.config.at_end:
            self._buffers.prepare(registry, _rank_in(registry))

    def save(self, step: int, shards: Sequence[Shard], registry: Registry, document: dict[str, Any]) -> Handle:
        start, id = time.perf_counter(), CheckpointId(step, document["attempt"])
        asked, tiers = self._asked
        wanted = tiers if asked == step and tiers and not self._last else self.tiers
        if self._saving is not None:  # one at a time: the second waits, for the staging memory is in use
            self._saving.join()
        files, world = self._buffers.files(registry), registry.mesh.world
        self._number += 1
        near, far = self._agreement("save", world), self._agreement("copy", world)
        if near.rank == 0 and self.durable in wanted:  # one copy at a time
            self.copies.join(near.heartbeat)
        file = files.of_rank(near.rank)
        failed = None
        try:
            staging = self._buffers.take(near.rank)
            staging.fill(file, shards)
        except OSError as error:
            failed = describe_error(error)

        def write(tier: Tier, write_id: str, report: Report) -> None:
            if not file.size:
                return
            path = f"{id}/{data_path(write_id, near.rank)}"
            target = None if tier is self.memory else ObjectPath(tier.store.url, path)
            write_file(self._writer, staging, file, write_id, target, self.config.deadline_seconds, report)
            if isinstance(tier, MemoryTier):
                tier.adopt(staging, id, path)

        def copy(tier: Tier, write_id: str, report: Report) -> None:
            if file.size:
                path = f"{id}/{data_path(write_id, far.rank)}"
                source, target = ObjectPath(self.disk.store.url, path), ObjectPath(tier.store.url, path)
                copy_file(self._copier, source, file, write_id, target, self.config.deadline_seconds, report)

        job = SaveTask(id, wanted, self.durable, Content(registry, files, document), again=self._last)
        self._saving = ZarrHandle(self, job, near, far, write, copy, self.disk)
        self._saving.start(failed)
        self._saving.blocked_seconds = time.perf_counter() - start
        if self._interval is not None:
            self._interval.saved(self._saving.blocked_seconds)
        return self._saving

    @property
    def ends(self) -> bool:
        """Whether the run will do no more steps: who waits for a save then waits for its copy too."""
        return self._last or self._asked[0] == self._steps

    def held(self) -> Collection[CheckpointId]:
        """What retention may not touch."""
        return self.copies.held()

    def _agreement(self, kind: str, world: int) -> Agreement:
        """One about a save or a copy has an end, later than that of a writer process that gets no further."""
        patience = None if kind == "load" else 1.25 * fair(self.config.deadline_seconds)
        rank = _rank() if world > 1 else 0
        return Agreement(self.store, f"ckpt/{kind}/{self._number}", rank, world, patience, f"ckpt/{kind}/newest")

    # --- look --------------------------------------------------------------------------------------------------------

    def list(self):
        found: set[CheckpointId] = set()
        for tier in self.tiers:
            try:
                found.update(tier.ids())
            except OSError as error:
                starts = not self._number  # its newest may be what is wanted: no going back for that
                if starts or not found:
                    raise unreadable(tier.store.url, describe_error(error)) from error
                self.note(f"{tier.store.url} cannot be read: {describe_error(error)}; going by the nearer tiers")
        return sorted(found)

    def lasts(self, id: CheckpointId) -> bool:
        """Whether it is anywhere but in memory."""
        return any(tier.has(id) for tier in self.tiers if tier is not self.memory)

    def note(self, text: str) -> None:
        """Keep what people should know."""
        if text not in self._notices:
            self._notices.append(text)

    def notices(self) -> Sequence[str]:
        found, self._notices = self._notices, []
        return found

    def document(self, id: CheckpointId) -> dict[str, Any]:
        return self.metas(id)[0][1].document

    def arrays(self, id: CheckpointId) -> dict[str, tuple[int, ...]]:
        return self.metas(id)[0][1].shapes

    def metas(self, id: CheckpointId) -> Sequence[tuple[Tier, Meta]]:
        """The tiers that have a checkpoint with what zarr.json says there, nearest first. Raises BadCheckpoint."""
        found, bad, silent = [], None, None
        for tier in self.tiers:
            try:
                found.append((tier, tier.meta(id)))
            except FileNotFoundError:
                continue
            except BadCheckpoint as damage:
                bad = damage
            except OSError as error:
                silent = unreadable(f"{tier.store.url}/{id}", describe_error(error))
        passed = bad or (silent and silent.what)
        if passed and found:
            self.note(f"{passed}; taking the copy in {found[0][0].store.url}")
        if found:
            return found
        if silent is not None:
            raise silent
        if bad is not None:
            raise bad
        held = ", ".join(map(str, self.list())) or "none"
        places = " or ".join(tier.store.url for tier in self.tiers)
        raise UserError(f"there is no checkpoint {id} in {places}.", f"There are: {held}.")

    # --- load --------------------------------------------------------------------------------------------------------

    def load(self, id: CheckpointId, shards: Iterable[Shard], registry: Registry) -> None:
        world = 1 if self.store is None else registry.mesh.world
        self._number += 1
        agreement = self._agreement("load", world)
        far = not all(tier.store.local for tier in self.tiers)
        for note in load(id, self.metas(id), [*shards], registry if far else None, agreement, self.config.verify):
            self.note(note)

    def close(self) -> None:
        if self._saving is not None:
            self._saving.join()
        self.copies.join()
        for failed, why in self.copies.split()[1]:
            self.note(f"checkpoint {failed} could not be saved: {why}")
        self._writer.close()
        self._copier.close()
        self._buffers.close()
        for tier in self.tiers:
            tier.close()
        self._saving = None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _rank_in(registry: Registry) -> int:
    """This rank where the registry is of all ranks; one process has rank 0."""
    return _rank() if registry.mesh.world > 1 else 0


def build(config: ZarrCheckpoint, run: Run, store: Store | None) -> ZarrCheckpointer:
    """The checkpointer of a run."""
    if store is not None:  # what an earlier one has said there is not for this one: every rank counts alike
        number = store.add(f"ckpt/made by {_rank()}", 1)
        store = cast("Store", dist.PrefixStore(f"ckpt/{number}", cast(dist.Store, store)))
    tiers = disk_tiers(config, run.run.dir or "")
    if config.memory_every is not None:
        tiers.insert(0, MemoryTier(run, config.memory_every, store))
    return ZarrCheckpointer(run, tiers, store, config)
