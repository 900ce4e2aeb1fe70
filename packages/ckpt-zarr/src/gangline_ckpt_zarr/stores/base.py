"""Interface of an object store, which holds the files of checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

METADATA = "zarr.json"  # name of the object that makes a directory tree a checkpoint: written last, deleted first


Ranges = Sequence[tuple[int, Sequence[memoryview]]]  # (offset in the object, buffers to fill from that offset on)
Read = Callable[[Ranges], None]


class ObjectPath(NamedTuple):
    """Path of an object, existing or to be created: the URL of its store, and its path in the store."""

    store: str
    path: str


class StoreError(OSError):
    """Failure of a request to a store, after retries of temporary errors. The message names store and path."""


class ObjectWriter(ABC):
    """Writer of one object, from its first byte to its last."""

    @abstractmethod
    def write(self, content: memoryview) -> None:
        """Append a block of a multiple of 4,096 bytes (the last block: any size). `content` may change after return."""

    @abstractmethod
    def close(self) -> None:
        """Finish the object; it is durable on return. Raises OSError; ValueError if its size differs from `create`."""

    @abstractmethod
    def abort(self) -> None:
        """Abort the write and delete as much of the object as possible. Never raises."""


class ObjectStore(ABC):
    """Tree of objects. Paths are relative to its root, with ``/``; a directory is created with its first object.

    A failure raises an OSError that names store and path. An object may be visible before its writer is closed; an
    object put by `commit` is visible only when it is complete.
    """

    url: str
    local: bool = False  # whether reads are about as cheap as reads from the page cache

    @abstractmethod
    def create(self, path: str, size: int) -> ObjectWriter:
        """Create an object of `size` bytes. Raises FileExistsError; OSError, at once if a full store is detected."""

    @abstractmethod
    def commit(self, path: str, content: bytes) -> None:
        """Write a small object atomically; it is durable on return. Raises FileExistsError if the object exists."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the content of a small object. Raises FileNotFoundError."""

    @abstractmethod
    def read_into(self, path: str, ranges: Ranges) -> None:
        """Fill each range's buffers from its offset on. Raises FileNotFoundError; EOFError if the object ends early."""

    def open_reader(self, path: str) -> AbstractContextManager[Read]:
        """Yield a function that does `read_into` from one object, for many reads. Raises OSError, here or in a read."""
        return nullcontext(partial(self.read_into, path))

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the size of an object in bytes. Raises FileNotFoundError."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether an object exists."""

    @abstractmethod
    def names(self, path: str = "") -> list[str]:
        """Return the names directly under `path`, sorted, from one listing; [] if `path` does not exist."""

    def list_holders(self, name: str) -> list[str]:
        """Return the entries directly under the root that contain an object called `name`, sorted."""
        return [entry for entry in self.names() if self.exists(f"{entry}/{name}")]

    @abstractmethod
    def walk(self, path: str = "") -> list[str]:
        """Return the paths of all objects under `path`, sorted."""

    @abstractmethod
    def list_sizes(self, path: str = "") -> dict[str, int]:
        """Return the size in bytes of every object under `path`, by path relative to `path`; {} if there is none."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete an object or a complete tree, each `METADATA` in the tree first. A missing object is not an error.

        Directories that become empty are deleted as well.
        """

    def lock(self) -> AbstractContextManager[None]:
        """Hold the exclusive lock of the store's root among all processes, if this kind of store has locks.

        Raises BlockingIOError if another process holds the lock.
        """
        return nullcontext()

    def close(self) -> None:
        """Free threads and connections."""


def plan_deletion(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split paths into metadata, outermost first, and data: a tree is a checkpoint until its metadata is deleted."""
    first = [path for path in paths if path.rpartition("/")[2] == METADATA]
    rest = [path for path in paths if path.rpartition("/")[2] != METADATA]
    return sorted(first, key=lambda path: path.count("/")), rest
