"""Interface of a tier, a place that stores checkpoints. All tiers have one byte layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from gangline import BadCheckpoint
from gangline.checkpoint.id import CheckpointId
from gangline_ckpt_zarr.format import zarr_json
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.stores.base import ObjectStore
from gangline_ckpt_zarr.tiers.completeness import find_file_error

if TYPE_CHECKING:  # tools that import this do not need torch
    from gangline_ckpt_zarr.save.staging import Staging
    from gangline_ckpt_zarr.stores.base import ObjectPath


class Tier(ABC):
    """A store of checkpoints, and how often it is saved to.

    `every`: steps between two saves to it; None: each requested save. `scope`: the ranks that one commit is for: "" for
    all ranks, else the machine. `beside`: another scope whose commit rank 0 also waits for in a save, or "".
    `left_out`: why saves skip the tier from now on, on every rank, or "".
    """

    scope: str = ""
    beside: str = ""
    left_out: str = ""

    def __init__(self, name: str, store: ObjectStore, every: int | None = None) -> None:
        self.name, self.store, self.every = name, store, every
        self._metas: dict[CheckpointId, Meta] = {}
        self._trusted: set[CheckpointId] = set()  # this run saved these, or found them complete

    # --- saving ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def commits(self, rank: int) -> bool:
        """Return whether this rank puts zarr.json into the tier."""

    @abstractmethod
    def get_target(self, path: str) -> ObjectPath | None:
        """Return the object to write a rank's file to; None if the sealed staging memory itself becomes the file."""

    @abstractmethod
    def adopt(self, staging: Staging, id: CheckpointId, path: str) -> None:
        """Take a rank's sealed file: it is `staging` if `get_target` was None. `path`: its name in the store."""

    def copy(self, id: CheckpointId, path: str, seconds: float, waiting: Callable[[], None]) -> str:
        """Copy this rank's file to other nodes, if they are to keep it. Return why that failed, "" if all is well.

        `seconds`: how long another node may be silent. `waiting` is called again and again meanwhile.
        """
        return ""

    @abstractmethod
    def abandon(self, id: CheckpointId, path: str) -> None:
        """Give up this rank's file of a save that failed. Raises OSError."""

    @abstractmethod
    def clear(self) -> None:
        """Delete what killed saves left: everything that looks like a checkpoint and has no zarr.json."""

    @abstractmethod
    def prune(self, run_dir: str, kept: Collection[CheckpointId]) -> None:
        """Delete what the retention rules do not keep, except `kept`: what is new or being copied. Raises OSError."""

    def mark_saved(self, id: CheckpointId) -> None:
        """Record that a checkpoint has become complete in this tier; called on every rank."""
        self._trusted.add(id)

    # --- reading -----------------------------------------------------------------------------------------------------

    def list_ids(self) -> list[CheckpointId]:
        """Return every complete checkpoint, oldest first. Raises OSError."""
        return sorted(id for name in self.store.list_holders(NAME) if (id := CheckpointId.parse(name)) is not None)

    def has(self, id: CheckpointId) -> bool:
        """Return whether the tier has a complete checkpoint with this id. Raises OSError."""
        return self.store.exists(f"{id}/{NAME}")

    def read_content(self, id: CheckpointId) -> bytes:
        """Return the bytes of zarr.json. Raises BadCheckpoint, FileNotFoundError."""
        return zarr_json.read_content(self.store, f"{id}/{NAME}")

    def read_meta(self, id: CheckpointId) -> Meta:
        """Return the metadata of a checkpoint; the last one is cached. Raises BadCheckpoint, FileNotFoundError."""
        meta = self._metas.get(id)  # looked up once: another thread may replace it meanwhile
        if meta is None:
            meta = zarr_json.read(self.read_content(id), f"{self.store.url}/{id}/{NAME}", id)
            self._metas = {id: meta}
        return meta

    def get_file_path(self, id: CheckpointId, meta: Meta, rank: int) -> str:
        """Return the path of a rank's file in the store."""
        return f"{id}/{meta.get_file_path(rank)}"

    def find_checkpoint_error(self, id: CheckpointId) -> str:
        """Return why a checkpoint cannot be complete, "" if it can: zarr.json is checked, and the sizes of all files.

        A checkpoint that this run saw become complete is trusted. Raises OSError if the store does not answer.
        """
        if id in self._trusted:
            return ""
        try:
            why = find_file_error(self.read_meta(id), self.store.list_sizes(str(id)))
        except BadCheckpoint as bad:
            return bad.why
        except FileNotFoundError:
            return f"it has no {NAME}"
        if not why:
            self._trusted.add(id)
        return why

    def close(self) -> None:
        """Close the store."""
        self.store.close()
