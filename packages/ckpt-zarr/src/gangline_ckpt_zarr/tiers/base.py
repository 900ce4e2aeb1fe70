"""Interface of a tier, one location of checkpoints. A file has the same bytes in all tiers."""

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
    """A store of checkpoints, and how often runs save to it.

    `every`: steps between two saves to the tier; None: each requested save. `scope`: ranks that one commit covers: ""
    for all ranks, else the number of their machine. `beside`: second scope whose commit rank 0 also waits for in
    a save; "": none. `left_out`: reason why all ranks skip the tier in later saves; "": not skipped.
    """

    scope: str = ""
    beside: str = ""
    left_out: str = ""

    def __init__(self, name: str, store: ObjectStore, every: int | None = None) -> None:
        self.name, self.store, self.every = name, store, every
        self._metas: dict[CheckpointId, Meta] = {}
        self._trusted: set[CheckpointId] = set()  # checkpoints that this run saved or found complete

    # --- saving ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def commits(self, rank: int) -> bool:
        """Return whether this rank puts zarr.json into the tier."""

    @abstractmethod
    def get_target(self, path: str) -> ObjectPath | None:
        """Return the object to write a rank's file to; None if the sealed staging memory itself becomes the file."""

    @abstractmethod
    def adopt(self, staging: Staging, id: CheckpointId, path: str) -> None:
        """Add a rank's sealed file, which is `staging` if `get_target` returned None, to the tier as `path`."""

    def copy(self, id: CheckpointId, path: str, seconds: float, waiting: Callable[[], None]) -> str:
        """Copy this rank's file to other nodes if the tier has copies. Return why the copy failed, "" on success.

        `seconds`: time-out of a node that does not answer. `waiting`: called repeatedly during the copy.
        """
        return ""

    @abstractmethod
    def abandon(self, id: CheckpointId, path: str) -> None:
        """Delete or release this rank's file of a failed save. Raises OSError."""

    @abstractmethod
    def clear(self) -> None:
        """Delete the remains of killed saves: every checkpoint directory that has no zarr.json."""

    @abstractmethod
    def prune(self, run_dir: str, kept: Collection[CheckpointId]) -> None:
        """Delete the checkpoints that neither retention nor `kept` (new, or being copied) keeps. Raises OSError."""

    def mark_saved(self, id: CheckpointId) -> None:
        """Record that a checkpoint is now complete in this tier; called on every rank."""
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
        """Return the metadata of a checkpoint; the last result is cached. Raises BadCheckpoint, FileNotFoundError."""
        meta = self._metas.get(id)  # looked up once: another thread may replace `_metas`
        if meta is None:
            meta = zarr_json.read(self.read_content(id), f"{self.store.url}/{id}/{NAME}", id)
            self._metas = {id: meta}
        return meta

    def get_file_path(self, id: CheckpointId, meta: Meta, rank: int) -> str:
        """Return the path of a rank's file in the store."""
        return f"{id}/{meta.get_file_path(rank)}"

    def find_checkpoint_error(self, id: CheckpointId) -> str:
        """Return why a checkpoint is incomplete, "" if zarr.json is valid and all files have the right sizes.

        A checkpoint that this run saved or found complete is not checked again. Raises OSError if the store does not
        answer.
        """
        if id in self._trusted:
            return ""
        try:
            why = find_file_error(self.read_meta(id), self.store.list_sizes(str(id)))
        except BadCheckpoint as bad:
            return bad.why
        except FileNotFoundError:
            return f"{NAME} is missing"
        if not why:
            self._trusted.add(id)
        return why

    def close(self) -> None:
        """Close the store."""
        self.store.close()
