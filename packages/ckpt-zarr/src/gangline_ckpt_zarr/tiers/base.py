"""One place where checkpoints lie. All places have the same byte layout."""

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

if TYPE_CHECKING:  # tools that come here have no use for torch
    from gangline_ckpt_zarr.save.staging import Staging
    from gangline_ckpt_zarr.stores.base import ObjectPath


class Tier(ABC):
    """A store and how often it is saved to.

    `every`: steps between two saves to it; None: each save that is asked for. `scope`: whom one commit is for, "" where
    it is for all ranks, else the machine. `beside`: another scope whose commit a save waits for on rank 0, or "".
    `left_out`: why saves skip it from now on, on every rank, or "".
    """

    scope: str = ""
    beside: str = ""
    left_out: str = ""

    def __init__(self, name: str, store: ObjectStore, every: int | None = None) -> None:
        self.name, self.store, self.every = name, store, every
        self._metas: dict[CheckpointId, Meta] = {}
        self._trusted: set[CheckpointId] = set()  # this run saw them made, or found all of them there

    # --- saving to it ------------------------------------------------------------------------------------------------

    @abstractmethod
    def commits(self, rank: int) -> bool:
        """Whether this rank puts zarr.json there."""

    @abstractmethod
    def get_target(self, path: str) -> ObjectPath | None:
        """The object to write a rank's file to; None where the sealed staging memory itself becomes the file."""

    @abstractmethod
    def adopt(self, staging: Staging, id: CheckpointId, path: str) -> None:
        """Take a rank's file that is sealed: `staging` where `get_target` was None. `path`: its name in the store."""

    def copy(self, id: CheckpointId, path: str, seconds: float, waiting: Callable[[], None]) -> str:
        """Have others keep what this rank put there, where they are to; why they do not, "" where all is well.

        `seconds`: how long another one may be silent. `waiting` is called again and again meanwhile.
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
        """Delete what the rules do not keep, but for `kept`: what is new or being copied. Raises OSError."""

    def mark_saved(self, id: CheckpointId) -> None:
        """A checkpoint has become whole there; called on every rank."""
        self._trusted.add(id)

    # --- looking at it -----------------------------------------------------------------------------------------------

    def list_ids(self) -> list[CheckpointId]:
        """Every whole checkpoint, oldest first. Raises OSError."""
        return sorted(id for name in self.store.list_holders(NAME) if (id := CheckpointId.parse(name)) is not None)

    def has(self, id: CheckpointId) -> bool:
        """Whether a whole checkpoint of that id is there. Raises OSError."""
        return self.store.exists(f"{id}/{NAME}")

    def read_content(self, id: CheckpointId) -> bytes:
        """The bytes of zarr.json. Raises BadCheckpoint, FileNotFoundError."""
        return zarr_json.read_content(self.store, f"{id}/{NAME}")

    def read_meta(self, id: CheckpointId) -> Meta:
        """What zarr.json says; read once. Raises BadCheckpoint, FileNotFoundError."""
        meta = self._metas.get(id)  # once: another thread may keep another one's meanwhile
        if meta is None:
            meta = zarr_json.read(self.read_content(id), f"{self.store.url}/{id}/{NAME}", id)
            self._metas = {id: meta}
        return meta

    def get_file_path(self, id: CheckpointId, meta: Meta, rank: int) -> str:
        """The file of a rank, in the store."""
        return f"{id}/{meta.get_file_path(rank)}"

    def find_checkpoint_error(self, id: CheckpointId) -> str:
        """Why a checkpoint cannot be whole, "" where it can: what zarr.json says, and whether its files are there.

        What this run saw become whole is trusted. Raises OSError where the store does not answer.
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
        """Let go of the store."""
        self.store.close()
