"""Interface of an object store, which holds the files of checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

METADATA = "zarr.json"  # the object that makes a tree a checkpoint: put last, deleted first


Ranges = Sequence[tuple[int, Sequence[memoryview]]]  # (offset, buffers to fill from there on)
Read = Callable[[Ranges], None]


class ObjectPath(NamedTuple):
    """Path of an object, existing or to be created: the URL of its store, and its path in the store."""

    store: str
    path: str


class StoreError(OSError):
    """A store did not fulfil a request, and retries did not help. The message names store and path."""


class ObjectWriter(ABC):
    """Writer of one object, from its first byte to its last."""

    @abstractmethod
    def write(self, content: memoryview) -> None:
        """Append a block: a multiple of 4,096 bytes, except the last. `content` may change once this has returned."""

    @abstractmethod
    def close(self) -> None:
        """Finish the object; it is durable on return. Raises OSError; ValueError if it has not the announced size."""

    @abstractmethod
    def abort(self) -> None:
        """Abort the write and leave as little as possible behind. Never raises."""


class ObjectStore(ABC):
    """A tree of objects. Paths are relative to its root, with ``/``; parents are created with their first object.

    A failure raises an OSError that names store and path. An object may be visible before its writer is closed; an
    object put by `commit` is visible only when it is complete.
    """

    url: str
    local: bool = False  # whether reads are as cheap as from the page cache

    @abstractmethod
    def create(self, path: str, size: int) -> ObjectWriter:
        """Create an object of `size` bytes. Raises FileExistsError; OSError at once if room is known to be missing."""

    @abstractmethod
    def commit(self, path: str, content: bytes) -> None:
        """Put a small object, durable and visible at once or not at all. Raises FileExistsError if it exists."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the content of a small object. Raises FileNotFoundError."""

    @abstractmethod
    def read_into(self, path: str, ranges: Ranges) -> None:
        """Fill the buffers from each offset on, in turn. Raises FileNotFoundError; EOFError if an object ends early."""

    def open_reader(self, path: str) -> AbstractContextManager[Read]:
        """Yield `read_into` of one object, for many reads. Raises OSError, here or in a read."""
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
        """Return the entries under the root that hold an object of this name, sorted."""
        return [entry for entry in self.names() if self.exists(f"{entry}/{name}")]

    @abstractmethod
    def walk(self, path: str = "") -> list[str]:
        """Return the paths of all objects under `path`, sorted."""

    @abstractmethod
    def list_sizes(self, path: str = "") -> dict[str, int]:
        """Return the bytes of every object under `path`, by its path from there; {} if `path` does not exist."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete an object or a complete tree, every `METADATA` in it first; a missing one is not an error.

        No empty directory is left behind.
        """

    def lock(self) -> AbstractContextManager[None]:
        """Hold the exclusive lock of this root among the processes that share it, if this kind of store has locks.

        Raises BlockingIOError if another process holds it.
        """
        return nullcontext()

    def close(self) -> None:
        """Free threads and connections."""


def plan_deletion(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split paths into metadata, outermost first, and the rest: a tree is a checkpoint until its metadata is gone."""
    first = [path for path in paths if path.rpartition("/")[2] == METADATA]
    rest = [path for path in paths if path.rpartition("/")[2] != METADATA]
    return sorted(first, key=lambda path: path.count("/")), rest
