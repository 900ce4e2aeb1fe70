"""`checkpoint=zarr`: the checkpointer that a run uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gangline.checkpoint.base import Checkpointer, CheckpointId, Handle
from gangline.errors import BadCheckpoint, UserError
from gangline_ckpt_zarr.agreement import Agreement
from gangline_ckpt_zarr.format.cells import Files
from gangline_ckpt_zarr.format.metadata import Meta
from gangline_ckpt_zarr.loading import load
from gangline_ckpt_zarr.saving import Content, Saving, told, write_file
from gangline_ckpt_zarr.staging import Staging
from gangline_ckpt_zarr.stores.open import open_store
from gangline_ckpt_zarr.tiers import Tier
from gangline_ckpt_zarr.writing.client import WriterProcess
from gangline_ckpt_zarr.writing.job import Target

if TYPE_CHECKING:
    from gangline.comm import Store
    from gangline.config.schema import Run
    from gangline.shard import Registry, Shard
    from gangline_ckpt_zarr.config import ZarrCheckpoint


class ZarrCheckpointer(Checkpointer):
    """Saves beside training, tier by tier; loads from the nearest tier that has a good copy."""

    def __init__(self, run_dir: str, tiers: Sequence[Tier], store: Store | None, config: ZarrCheckpoint) -> None:
        self._run_dir, self.tiers, self.store = run_dir, tiers, store
        self.verify, self.deadline = config.verify, config.deadline_seconds
        self._number = 0  # of saves and loads: all ranks count the same
        self._saving: Saving | None = None
        self._staging: Staging | None = None
        self._writer = WriterProcess()
        self._files: Files | None = None

    @property
    def run_dir(self) -> str:
        return self._run_dir

    # --- save --------------------------------------------------------------------------------------------------------

    def save(self, step: int, shards: Sequence[Shard], registry: Registry, document: dict[str, Any]) -> Handle:
        start, id = time.perf_counter(), CheckpointId(step, document["attempt"])
        tiers = self._due(step)
        if self._saving is not None:  # one at a time: the second waits, for the staging memory is in use
            self._saving.join()
        for tier in tiers:
            if tier.has(id):
                raise FileExistsError(f"{tier.store.url}/{id} is there already, and a checkpoint is never overwritten")
        if self._files is None or self._files.registry != registry:
            self._files = Files(registry)
        talk = self._agreement("save", registry.mesh.world)
        file = self._files.of_rank(talk.rank)
        if self._staging is None:
            self._staging = Staging()
            self._writer.start([self._staging.fd])
        staging, failed = self._staging, None

        def write(tier: Tier, path: str, report: Callable[[float], None]) -> None:
            if file.size:
                write_file(self._writer, staging, file, Target(tier.store.url, path), self.deadline, report)

        saving = Saving(id, tiers, Content(registry, self._files, document), talk, write, self.run_dir)
        try:
            staging.fill(file, shards)
        except OSError as error:
            failed = told(error)
        self._saving = saving
        saving.start(failed)
        saving.blocked_seconds = time.perf_counter() - start
        return saving

    def _due(self, step: int) -> Sequence[Tier]:
        """The tiers that get the save of this step; all of them where it is due for none, as at the end."""
        due = [tier for tier in self.tiers if tier.every is None or step % tier.every == 0]
        return due or self.tiers

    def _agreement(self, kind: str, world: int) -> Agreement:
        self._number += 1
        rank = dist.get_rank() if world > 1 else 0
        return Agreement(self.store, f"ckpt/{kind}/{self._number}", rank, world)

    # --- look --------------------------------------------------------------------------------------------------------

    def list(self):
        return sorted({id for tier in self.tiers for id in tier.ids()})

    def document(self, id: CheckpointId) -> dict[str, Any]:
        return self.metas(id)[0][1].document

    def arrays(self, id: CheckpointId) -> dict[str, tuple[int, ...]]:
        return self.metas(id)[0][1].shapes

    def metas(self, id: CheckpointId) -> Sequence[tuple[Tier, Meta]]:
        """The tiers that have a checkpoint with what zarr.json says there, nearest first. Raises BadCheckpoint."""
        found, bad = [], None
        for tier in self.tiers:
            try:
                found.append((tier, tier.meta(id)))
            except FileNotFoundError:
                continue
            except BadCheckpoint as damage:
                bad = damage
        if found:
            return found
        if bad is not None:
            raise bad
        held = ", ".join(map(str, self.list())) or "none"
        places = " or ".join(tier.store.url for tier in self.tiers)
        raise UserError(f"there is no checkpoint {id} in {places}.", f"There are: {held}.")

    # --- load --------------------------------------------------------------------------------------------------------

    def load(self, id: CheckpointId, shards: Iterable[Shard], registry: Registry) -> None:
        world = 1 if self.store is None else registry.mesh.world
        load(id, self.metas(id), [*shards], self._agreement("load", world), self.verify)

    def close(self) -> None:
        if self._saving is not None:
            self._saving.join()
        self._writer.close()
        if self._staging is not None:
            self._staging.close()
        for tier in self.tiers:
            tier.store.close()
        self._saving = self._staging = None


def build(config: ZarrCheckpoint, run: Run, store: Store | None) -> ZarrCheckpointer:
    """The checkpointer of a run."""
    assert run.run.dir is not None, "a run has its directory before it has a checkpointer"
    path = config.path or str(Path(run.run.dir) / "checkpoints")
    tiers = [Tier("disk", open_store(path), None, config.keep_last, config.keep_every)]
    if config.durable is not None:
        durable = open_store(config.durable)
        tiers.append(
            Tier("durable", durable, config.durable_every, config.durable_keep_last, config.durable_keep_every)
        )
    return ZarrCheckpointer(run.run.dir, tiers, store, config)
