"""Where checkpoints lie: up to three places with one byte layout in all of them, the nearest first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.checkpoint.base import CheckpointId
from gangline.checkpoint.retention import Lacks, superfluous
from gangline.errors import BadCheckpoint
from gangline_ckpt_zarr.format import metadata
from gangline_ckpt_zarr.format.metadata import NAME, Meta
from gangline_ckpt_zarr.stores.base import ObjectStore
from gangline_ckpt_zarr.stores.open import open_store
from gangline_ckpt_zarr.tiers.whole import lacking

if TYPE_CHECKING:
    from gangline_ckpt_zarr.config import ZarrCheckpoint


@dataclass
class Tier:
    """A store, how often it is saved to and what is kept in it. `every`: None is at each save that is asked for."""

    name: str  # "memory", "disk", "durable"
    store: ObjectStore
    every: int | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    scope: str = ""  # of a commit: "" where one is for all, else the machine it is for
    _metas: dict[CheckpointId, Meta] = field(default_factory=dict)
    _trusted: set[CheckpointId] = field(default_factory=set)  # this run saw them made, or found all of them there

    def ids(self) -> list[CheckpointId]:
        """Every whole checkpoint, oldest first."""
        return sorted(id for name in self.store.holding(NAME) if (id := CheckpointId.parse(name)) is not None)

    def has(self, id: CheckpointId) -> bool:
        return self.store.exists(f"{id}/{NAME}")

    def content(self, id: CheckpointId) -> bytes:
        """The bytes of zarr.json. Raises BadCheckpoint, FileNotFoundError."""
        return metadata.content_of(self.store, f"{id}/{NAME}")

    def meta(self, id: CheckpointId) -> Meta:
        """What zarr.json says; read once. Raises BadCheckpoint, FileNotFoundError."""
        found = self._metas.get(id)  # once: another thread may keep another one's meanwhile
        if found is None:
            found = metadata.read(self.content(id), f"{self.store.url}/{id}/{NAME}", id)
            self._metas = {id: found}
        return found

    def commits(self, rank: int) -> bool:
        """Whether this rank puts zarr.json there."""
        return rank == 0

    def path(self, id: CheckpointId, meta: Meta, rank: int) -> str:
        """The file of a rank, in the store."""
        return f"{id}/{meta.path(rank)}"

    def saved(self, id: CheckpointId) -> None:
        """A checkpoint has become whole there; called on every rank."""
        self._trusted.add(id)

    def lacks(self, id: CheckpointId) -> str:
        """Why a checkpoint cannot be whole, "" where it can: what zarr.json says, and whether its files are there.

        What this run saw become whole is trusted. Raises OSError where the store does not answer.
        """
        if id in self._trusted:
            return ""
        try:
            why = lacking(self.meta(id), self.store.sizes(str(id)))
        except BadCheckpoint as bad:
            return bad.why
        except FileNotFoundError:
            return f"it has no {NAME}"
        if not why:
            self._trusted.add(id)
        return why

    def abandon(self, id: CheckpointId, path: str) -> None:
        """Delete this rank's file of a save that came to nothing."""
        self.store.delete(path)

    def clear(self) -> None:
        """Delete what dead saves left: everything that looks like a checkpoint and has no zarr.json."""
        whole = {*self.ids()}
        for name in self.store.names():
            id = CheckpointId.parse(name)
            if id is not None and id not in whole:
                self.store.delete(name)

    def prune(self, run_dir: str, kept: Collection[CheckpointId]) -> None:
        """Delete what the rules do not keep, but for `kept`: what has just become whole, and what is being copied."""
        if self.keep_last is None:
            return
        for id in self.superfluous(run_dir, lambda id: "" if id in kept else self.lacks(id), kept):
            self.store.delete(str(id))
            self._trusted.discard(id)

    def close(self) -> None:
        """Let go of the store."""
        self.store.close()

    def superfluous(self, run_dir: str, lacks: Lacks, others: Collection[CheckpointId] = ()) -> list[CheckpointId]:
        """What the rules do not keep; see core's."""
        assert self.keep_last is not None
        return superfluous(run_dir, self.ids(), self.keep_last, lacks, others, self.keep_every)


def disk_tiers(config: ZarrCheckpoint, run_dir: str) -> list[Tier]:
    """The tiers of a run that a tool sees too: its own place, and the durable one."""
    near = open_store(config.path or str(Path(run_dir) / "checkpoints"), deadline_seconds=config.deadline_seconds)
    tiers = [Tier("disk", near, None, config.keep_last, config.keep_every)]
    if config.durable is not None:
        far = open_store(config.durable, deadline_seconds=config.deadline_seconds)
        tiers.append(Tier("durable", far, config.durable_every, config.durable_keep_last, config.durable_keep_every))
    return tiers
