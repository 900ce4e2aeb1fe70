"""Listing of the checkpoints under a root, with sizes, times and completeness by file sizes. No array is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from gangline import BadCheckpoint
from gangline.checkpoint.id import CheckpointId
from gangline_ckpt_zarr.errors import describe_error
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.stores.base import ObjectStore
from gangline_ckpt_zarr.tiers.base import Tier
from gangline_ckpt_zarr.tiers.completeness import find_file_error


@dataclass
class ListedCheckpoint:
    """One checkpoint in one tier: its files, and when it was last written to (seconds since 1970; None: unknown)."""

    id: CheckpointId
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of each file, by path in the checkpoint
    modified: float | None = None

    def add(self, name: str, nbytes: int, modified: float | None) -> None:
        """Add one file of the checkpoint."""
        self.sizes[name] = nbytes
        if modified is not None:
            self.modified = max(modified, self.modified or modified)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())

    def state(self, tier: Tier) -> str:
        """Return "complete" if zarr.json is good and all files have the right size, "unfinished", or "damaged: why"."""
        if NAME not in self.sizes:
            return "unfinished"
        try:
            meta = tier.read_meta(self.id)
            # The memory of this machine may have only the files of its own ranks: missing files are not damage.
            why = "" if tier.name == "memory" else find_file_error(meta, self.sizes)
        except BadCheckpoint as bad:
            why = bad.why
        except OSError as error:
            why = describe_error(error)
        return f"damaged: {why}" if why else "complete"


def list_checkpoints(store: ObjectStore) -> list[ListedCheckpoint]:
    """Return every checkpoint, complete or not, oldest first."""
    return sorted(_local(store.url) if store.local else _list_remote(store.url), key=lambda entry: entry.id)


def _local(root: str) -> Iterator[ListedCheckpoint]:
    try:
        places = list(os.scandir(root))
    except FileNotFoundError:
        return
    for place in places:
        id = CheckpointId.parse(place.name)
        if id is not None and place.is_dir():
            entry = ListedCheckpoint(id)
            try:
                _add(entry, place.path)
            except FileNotFoundError:
                continue  # the checkpoint was deleted meanwhile
            yield entry


def _add(entry: ListedCheckpoint, directory: str, within: str = "") -> None:
    with os.scandir(directory) as files:
        for file in files:
            if file.is_dir(follow_symlinks=False):
                _add(entry, file.path, f"{within}{file.name}/")
            else:
                status = file.stat()
                entry.add(within + file.name, status.st_size, status.st_mtime)


def _list_remote(url: str) -> Iterator[ListedCheckpoint]:
    """Yield all checkpoints under a URL, from one recursive listing, which the store may send in pages."""
    import fsspec

    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    checkpoints: dict[CheckpointId, ListedCheckpoint] = {}
    try:
        every = files.find(root, detail=True)
    except FileNotFoundError:
        return
    for path, facts in every.items():
        name, _, rest = path.removeprefix(root).lstrip("/").partition("/")
        id = CheckpointId.parse(name)
        if id is not None and rest:
            checkpoints.setdefault(id, ListedCheckpoint(id)).add(rest, facts["size"] or 0, _find_modified_time(facts))
    yield from checkpoints.values()


def _find_modified_time(facts: dict) -> float | None:
    """Return a file's modification time in seconds since 1970; None if unknown. Its key in `facts` differs by store."""
    for key in ("LastModified", "mtime", "updated", "last_modified", "created"):
        value = facts.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            return datetime.fromisoformat(value).timestamp()
    return None
