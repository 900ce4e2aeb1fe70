"""Tier in a directory or a remote store: the disk tier, the durable tier, and any store that a tool opens."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, final

from gangline.checkpoint.id import CheckpointId
from gangline.checkpoint.retention import Lacks, find_superfluous
from gangline_ckpt_zarr.stores.base import ObjectPath, ObjectStore
from gangline_ckpt_zarr.stores.open import open_store
from gangline_ckpt_zarr.tiers.base import Tier

if TYPE_CHECKING:
    from gangline_ckpt_zarr.config import ZarrCheckpoint
    from gangline_ckpt_zarr.save.staging import Staging


@final
class StoreTier(Tier):
    """Tier that keeps the newest `keep_last` checkpoints (None: all) and one every `keep_every` steps (None: none)."""

    def __init__(
        self,
        name: str,
        store: ObjectStore,
        every: int | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        super().__init__(name, store, every)
        self.keep_last, self.keep_every = keep_last, keep_every

    def commits(self, rank: int) -> bool:
        return rank == 0

    def get_target(self, path: str) -> ObjectPath:
        return ObjectPath(self.store.url, path)

    def adopt(self, staging: Staging, id: CheckpointId, path: str) -> None:
        """Return without effect: the file was written from the staging memory."""

    def abandon(self, id: CheckpointId, path: str) -> None:
        self.store.delete(path)

    def clear(self) -> None:
        whole = {*self.list_ids()}
        for name in self.store.names():
            id = CheckpointId.parse(name)
            if id is not None and id not in whole:
                self.store.delete(name)

    def prune(self, run_dir: str, kept: Collection[CheckpointId]) -> None:
        if self.keep_last is None:
            return
        for id in self.list_superfluous(run_dir, lambda id: "" if id in kept else self.find_checkpoint_error(id), kept):
            self.store.delete(str(id))
            self._trusted.discard(id)

    def list_superfluous(self, run_dir: str, lacks: Lacks, others: Collection[CheckpointId] = ()) -> list[CheckpointId]:
        """Return the checkpoints that the rules of `gangline.checkpoint.retention` do not keep. Raises OSError."""
        assert self.keep_last is not None
        return find_superfluous(run_dir, self.list_ids(), self.keep_last, lacks, others, self.keep_every)


def build_tiers(config: ZarrCheckpoint, run_dir: str) -> list[StoreTier]:
    """Build the disk tier of a run, and its durable tier if it has one. Raises UserError if a URL cannot be opened."""
    near = open_store(config.path or str(Path(run_dir) / "checkpoints"), deadline_seconds=config.deadline_seconds)
    tiers = [StoreTier("disk", near, None, config.keep_last, config.keep_every)]
    if config.durable is not None:
        far = open_store(config.durable, deadline_seconds=config.deadline_seconds)
        keep = config.durable_keep_last, config.durable_keep_every
        tiers.append(StoreTier("durable", far, config.durable_every, *keep))
    return tiers
