"""Store in a node's memory, which reads files missing there from the memory of other nodes. Torch-free."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import final

from gangline_ckpt_zarr.stores.base import ObjectStore, ObjectWriter, Ranges, Read
from gangline_ckpt_zarr.stores.local import LocalStore
from gangline_ckpt_zarr.tiers.peers import Peer


@final
class MemoryStore(ObjectStore):
    """Store that writes on this node, and also reads `elsewhere`: path -> (keeper with the file, size in bytes)."""

    local = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.here = LocalStore(root)
        self.url = self.here.url
        self.elsewhere: dict[str, tuple[Peer, int]] = {}

    def create(self, path: str, size: int) -> ObjectWriter:
        return self.here.create(path, size)

    def commit(self, path: str, content: bytes) -> None:
        self.here.commit(path, content)

    def read(self, path: str) -> bytes:
        far = self._find_peer(path)
        return self.here.read(path) if far is None else far[0].read(path)

    def read_into(self, path: str, ranges: Ranges) -> None:
        with self.open_reader(path) as read:
            read(ranges)

    @contextlib.contextmanager
    def open_reader(self, path: str) -> Iterator[Read]:
        if (far := self._find_peer(path)) is not None:
            yield partial(far[0].read_into, path)
            return
        with self.here.open_reader(path) as read:
            yield read

    def size(self, path: str) -> int:
        far = self._find_peer(path)
        return self.here.size(path) if far is None else far[1]

    def exists(self, path: str) -> bool:
        return path in self.elsewhere or self.here.exists(path)

    def names(self, path: str = "") -> list[str]:
        """Return the local names directly under `path`."""
        return self.here.names(path)

    def walk(self, path: str = "") -> list[str]:
        """Return the local paths under `path`."""
        return self.here.walk(path)

    def list_sizes(self, path: str = "") -> dict[str, int]:
        start = f"{path}/" if path else ""
        far = {name.removeprefix(start): size for name, (_, size) in self.elsewhere.items() if name.startswith(start)}
        return {**far, **self.here.list_sizes(path)}

    def delete(self, path: str) -> None:
        """Delete local objects, and forget objects on other nodes."""
        for name in [name for name in self.elsewhere if name == path or name.startswith(f"{path}/")]:
            del self.elsewhere[name]
        self.here.delete(path)

    def lock(self) -> AbstractContextManager[None]:
        return self.here.lock()

    def _find_peer(self, path: str) -> tuple[Peer, int] | None:
        """Return (peer that has a file, file size in bytes); None if the file is on this node or does not exist."""
        return None if self.here.exists(path) else self.elsewhere.get(path)
