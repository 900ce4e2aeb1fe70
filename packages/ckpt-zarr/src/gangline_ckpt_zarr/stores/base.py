"""What a checkpoint asks of the place where it lies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

METADATA = "zarr.json"  # what makes a tree a checkpoint: put last, deleted first


Ranges = Sequence[tuple[int, Sequence[memoryview]]]  # offsets, and the buffers to fill from there on
Read = Callable[[Ranges], None]


class ObjectPath(NamedTuple):
    """An object, there or to be made: the URL of its store, and its path in it."""

    store: str
    path: str


class StoreError(OSError):
    """A store did not do what was asked of it, and asking again did not help. The message names store and path."""


class ObjectWriter(ABC):
    """One object being written, from its first byte to its last."""

    @abstractmethod
    def write(self, content: memoryview) -> None:
        """Append. Blocks are multiples of 4,096 bytes but for the last; `content` may change once this has returned."""

    @abstractmethod
    def close(self) -> None:
        """Return once the object is durable. Raises OSError; ValueError where it is not as long as was announced."""

    @abstractmethod
    def abort(self) -> None:
        """Give up and leave as little as can be; raises nothing."""


class ObjectStore(ABC):
    """A tree of objects. Paths are relative to its root, with ``/``; parents come with their first object.

    What cannot be done is an OSError that names store and path. An object being written may be seen before its writer
    is closed; what `commit` puts may not.
    """

    url: str
    local: bool = False  # reads are as cheap as the page cache

    @abstractmethod
    def create(self, path: str, size: int) -> ObjectWriter:
        """A new object of `size` bytes. FileExistsError where there is one; OSError now where room is known to lack."""

    @abstractmethod
    def commit(self, path: str, content: bytes) -> None:
        """Put a small object, durable and visible at once or not at all. FileExistsError where there is one."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """A small object, whole. FileNotFoundError."""

    @abstractmethod
    def read_into(self, path: str, ranges: Ranges) -> None:
        """From each offset on, fill the buffers one after another. FileNotFoundError; EOFError where it ends early."""

    def open_reader(self, path: str) -> AbstractContextManager[Read]:
        """`read_into` of one object, many times over; OSError now or then."""
        return nullcontext(partial(self.read_into, path))

    @abstractmethod
    def size(self, path: str) -> int:
        """Bytes of one object. FileNotFoundError."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is such an object."""

    @abstractmethod
    def names(self, path: str = "") -> list[str]:
        """What lies directly under `path`, sorted, from one listing; nothing where there is no such place."""

    def list_holders(self, name: str) -> list[str]:
        """The entries under the root that hold an object of this name, sorted."""
        return [entry for entry in self.names() if self.exists(f"{entry}/{name}")]

    @abstractmethod
    def walk(self, path: str = "") -> list[str]:
        """The paths of all objects under `path`, sorted."""

    @abstractmethod
    def list_sizes(self, path: str = "") -> dict[str, int]:
        """Bytes of every object under `path`, by its path from there; nothing where there is no such place."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove an object or a whole tree, every `METADATA` in it first; a missing one is no error.

        No empty directory is left behind.
        """

    def lock(self) -> AbstractContextManager[None]:
        """Hold the exclusive lock of this root among the processes that share it, if this kind of store has locks.

        Raises BlockingIOError where another process holds it.
        """
        return nullcontext()

    def close(self) -> None:
        """Let go of threads and connections."""


def plan_deletion(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """What must be gone, outermost first, before the rest may go: a tree is a checkpoint until its metadata is gone."""
    first = [path for path in paths if path.rpartition("/")[2] == METADATA]
    rest = [path for path in paths if path.rpartition("/")[2] != METADATA]
    return sorted(first, key=lambda path: path.count("/")), rest
