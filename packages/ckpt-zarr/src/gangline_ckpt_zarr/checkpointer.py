"""`checkpoint=zarr`: the checkpointer that a run uses."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist

from gangline import BadCheckpoint, UserError
from gangline.checkpoint.base import Checkpointer, SaveHandle, SaveRequest, SaveState
from gangline.checkpoint.id import CheckpointId
from gangline_ckpt_zarr.agreement import Agreement, PrefixedStore
from gangline_ckpt_zarr.errors import describe_error
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.load.nearest import make_unreadable_error
from gangline_ckpt_zarr.load.shards import load
from gangline_ckpt_zarr.notes import Notes
from gangline_ckpt_zarr.save.buffers import Buffers
from gangline_ckpt_zarr.save.durable import DurableCopies, DurableCopy
from gangline_ckpt_zarr.save.interval import Interval, measure_mtbf
from gangline_ckpt_zarr.save.staged import StagedDelivery
from gangline_ckpt_zarr.save.task import SaveTask
from gangline_ckpt_zarr.save.transfer import compute_hang_seconds
from gangline_ckpt_zarr.save.writer.client import WriterClient
from gangline_ckpt_zarr.tiers.base import Tier
from gangline_ckpt_zarr.tiers.memory import MemoryTier
from gangline_ckpt_zarr.tiers.stored import build_tiers

if TYPE_CHECKING:
    from gangline.comm.base import Store
    from gangline.config import Run
    from gangline.shard import Registry, Shard
    from gangline_ckpt_zarr.config import ZarrCheckpoint


@final
class ZarrCheckpointer(Checkpointer):
    """Checkpointer that saves in the background, tier by tier, and loads from the nearest tier with a good copy.

    A save to the durable tier waits until no copy to that tier is running; other saves do not wait for the copy.
    """

    def __init__(self, run: Run, tiers: Sequence[Tier], store: Store | None, config: ZarrCheckpoint) -> None:
        assert run.job.dir is not None, "run.dir must be set before the checkpointer is built"
        self._run_dir, self._steps, self.tiers, self.store = run.job.dir, run.steps, tiers, store
        self.memory = next((tier for tier in tiers if isinstance(tier, MemoryTier)), None)
        self.disk = next(tier for tier in tiers if tier.name == "disk")
        self.durable = next((tier for tier in tiers if tier.name == "durable"), None)
        self.config = config
        self._notes, self._trouble = Notes(), ""
        for note in self.memory.notes if self.memory is not None else ():
            self._notes.add(note)
        self._number = 0  # number of saves and loads so far, equal on all ranks
        self._newest: SaveHandle | None = None
        self._writer, self._copier = WriterClient(), WriterClient()
        self.copies = DurableCopies()
        self._buffers = Buffers(self.memory, self._writer)
        mtbf = measure_mtbf(self._run_dir) if config.mtbf_hours is None else config.mtbf_hours * 3600
        self._interval = Interval(mtbf) if config.every == "auto" else None

    @property
    def run_dir(self) -> str:
        return self._run_dir

    # --- due saves ---------------------------------------------------------------------------------------------------

    def get_due_save(self, step: int, seconds: float, every: str | int | None) -> SaveRequest | None:
        """Return the save that is due after a step, with its tiers; None if no save is due.

        With `at_end`, the save after the last step has all tiers. If the memory tier is saved to at every step, the
        record of a step is reported only once its save is visible: then a kill loses no reported step.
        """
        memory = None if self.memory is None or self.memory.left_out else self.memory
        kept = memory is not None and memory.every == 1
        if step == self._steps and self.config.at_end:
            return SaveRequest(step, record_waits=kept)
        if self._is_near_due(step, seconds, every):
            due = [tier for tier in self.tiers if tier is memory or tier.every is None or step % tier.every == 0]
            return SaveRequest(step, tiers=tuple(tier.name for tier in due), record_waits=kept)
        if memory is not None and memory.every is not None and step % memory.every == 0:
            return SaveRequest(step, tiers=(memory.name,), record_waits=kept)
        return None

    def _is_near_due(self, step: int, seconds: float, every: str | int | None) -> bool:
        """Return whether a save by `checkpoint.every` is due. With every=auto, only rank 0 may return True."""
        if self._interval is None:
            return super().get_due_save(step, seconds, every) is not None
        saving = self._newest is not None and self._newest.state is SaveState.WRITING
        return self._interval.is_due(seconds, saving, copying=bool(self.copies.list_sources())) and _rank() == 0

    # --- save --------------------------------------------------------------------------------------------------------

    def prepare(self, registry: Registry) -> None:
        if self.config.every is not None or self.config.at_end:
            self._buffers.prepare(registry, _rank_in(registry))

    def save(
        self, request: SaveRequest, shards: Sequence[Shard], registry: Registry, document: dict[str, Any]
    ) -> SaveHandle:
        start = time.perf_counter()
        self._wait()  # one save at a time: the newest save may still use the staging memory
        self._number += 1
        task = self._make_task(request, registry, document)
        near, far = (
            self._make_agreement(kind, registry.mesh.world, task.deadline_seconds) for kind in ("save", "copy")
        )
        if near.rank == 0 and task.copied:  # one copy to the durable tier at a time
            self.copies.join(near.send_heartbeat)
        copy = DurableCopy(task, far, self._copier, self.copies)
        delivery = StagedDelivery(task, near, self._writer, copy, self.copies)
        reason = ""
        try:
            delivery.staging = self._buffers.stage(near.rank, task.get_rank_file(near.rank), shards)
            delivery.no_memory = self._buffers.no_memory
        except OSError as error:
            reason = describe_error(error)
        delivery.start(reason)
        seconds = time.perf_counter() - start
        self._newest = SaveHandle(task.id, seconds, delivery.done, copy.done, delivery.compute_total_progress)
        if self._interval is not None and self.disk in task.wanted:  # memory alone may be lost with its node
            self._interval.note_save(seconds)
        return self._newest

    def _wait(self) -> None:
        """Wait until the newest save is visible, or has failed."""
        if self._newest is not None:
            wait([self._newest.visible])

    def _make_task(self, request: SaveRequest, registry: Registry, document: dict[str, Any]) -> SaveTask:
        id, limit = CheckpointId(request.step, document["attempt"]), self.config.deadline_seconds
        return SaveTask(
            id=id,
            run_dir=self._run_dir,
            tiers=self.tiers,
            wanted=[tier for tier in self.tiers if not request.tiers or tier.name in request.tiers],
            disk=self.disk,
            durable=self.durable,
            registry=registry,
            files=self._buffers.get_files(registry),
            document=document,
            notes=self._notes,
            deadline_seconds=limit if request.deadline_seconds is None else min(limit, request.deadline_seconds),
            again=request.last,
        )

    def _make_agreement(self, kind: str, world: int, deadline_seconds: float | None = None) -> Agreement:
        """Return the agreement of a save, copy or load.

        A load has no time-out. The time-out of a save or copy is longer than that of a hanging writer process.
        """
        patience = None if deadline_seconds is None else 1.25 * compute_hang_seconds(deadline_seconds)
        rank = _rank() if world > 1 else 0
        return Agreement(self.store, f"ckpt/{kind}/{self._number}", rank, world, patience, f"ckpt/{kind}/newest")

    # --- existing checkpoints ----------------------------------------------------------------------------------------

    def list(self):
        """Return the checkpoints of all tiers, oldest first.

        Raises UserError if a tier that may have the newest checkpoint cannot be read.
        """
        ids: set[CheckpointId] = set()
        for tier in self.tiers:
            try:
                ids.update(tier.list_ids())
            except OSError as error:
                starts = not self._number  # no save or load yet: a resume must not fall back to an older checkpoint
                if starts or not ids:
                    raise make_unreadable_error(tier.store.url, describe_error(error)) from error
                self._notes.add(f"{tier.store.url} cannot be read: {describe_error(error)}; using the other tiers")
        return sorted(ids)

    def is_lasting(self, id: CheckpointId) -> bool:
        """Return whether any tier except the memory tier has a checkpoint."""
        return any(tier.has(id) for tier in self.tiers if tier is not self.memory)

    def take_notices(self) -> Sequence[str]:
        trouble = "" if self.memory is None else self.memory.read_trouble()
        if trouble and trouble != self._trouble:
            self._trouble = trouble
            self._notes.add(trouble)
        return self._notes.take()

    def read_document(self, id: CheckpointId) -> dict[str, Any]:
        return self.read_metas(id)[0][1].document

    def read_shapes(self, id: CheckpointId) -> dict[str, tuple[int, ...]]:
        return self.read_metas(id)[0][1].shapes

    def read_metas(self, id: CheckpointId) -> Sequence[tuple[Tier, Meta]]:
        """Return (tier, metadata) of each tier with the checkpoint, nearest first. Raises BadCheckpoint, UserError."""
        copies, bad, silent = [], None, None
        for tier in self.tiers:
            try:
                copies.append((tier, tier.read_meta(id)))
            except FileNotFoundError:
                continue
            except BadCheckpoint as damage:
                bad = damage
            except OSError as error:
                silent = make_unreadable_error(f"{tier.store.url}/{id}", describe_error(error))
        problem = bad or (silent and silent.what)
        if problem and copies:
            self._notes.add(f"{problem}; loading the copy in {copies[0][0].store.url} instead")
        if copies:
            return copies
        if silent is not None:
            raise silent
        if bad is not None:
            raise bad
        names = ", ".join(map(str, self.list())) or "none"
        places = " or ".join(tier.store.url for tier in self.tiers)
        raise UserError(f"checkpoint {id} does not exist in {places}.", f"Existing checkpoints: {names}.")

    # --- load --------------------------------------------------------------------------------------------------------

    def load(self, id: CheckpointId, shards: Iterable[Shard], registry: Registry) -> None:
        world = 1 if self.store is None else registry.mesh.world
        self._number += 1
        agreement = self._make_agreement("load", world)
        far = not all(tier.store.local for tier in self.tiers)
        for note in load(id, self.read_metas(id), [*shards], registry if far else None, agreement, self.config.verify):
            self._notes.add(note)

    def close(self) -> None:
        self._wait()
        self.copies.join()
        self._writer.close()
        self._copier.close()
        self._buffers.close()
        for tier in self.tiers:
            tier.close()
        self._newest = None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _rank_in(registry: Registry) -> int:
    """Return this process's rank if the registry covers all ranks, else 0 (one process)."""
    return _rank() if registry.mesh.world > 1 else 0


def build(config: ZarrCheckpoint, run: Run, store: Store | None) -> ZarrCheckpointer:
    """Build the checkpointer of a run."""
    if store is not None:
        # An earlier checkpointer of this job may have left keys, so use a new prefix, equal on all ranks.
        number = store.add(f"ckpt/made by {_rank()}", 1)
        store = PrefixedStore(store, f"ckpt/{number}")
    tiers: list[Tier] = [*build_tiers(config, run.job.dir or "")]
    if config.memory_every is not None:
        tiers.insert(0, MemoryTier(run, config.memory_every, store, config.memory_copies))
    return ZarrCheckpointer(run, tiers, store, config)
