"""What the trainer and its writer process say to each other: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from gangline_ckpt_zarr.format.checksum import CHECKSUM, TRAILER

if TYPE_CHECKING:
    from gangline_ckpt_zarr.format.chunks import ChunkRun


class ChunkSpan(NamedTuple):
    """`number` chunks, the k-th at `base` + k * `stride`: `nbytes` bytes, then their crc32c (4 bytes).

    Where `seal` is given, a seal (4 bytes) follows that starts from it, `first` being the
    number of the first of these chunks in their box; see `format.seal`.
    """

    base: int
    stride: int
    nbytes: int
    number: int
    seal: int | None = None
    first: int = 0

    @property
    def trailer(self) -> int:
        """Bytes behind each chunk."""
        return CHECKSUM if self.seal is None else TRAILER

    @property
    def end(self) -> int:
        """Just behind the last checksum or seal."""
        return self.base + (self.number - 1) * self.stride + self.nbytes + self.trailer


def spans_of(runs: Iterable[ChunkRun], seal_start: Callable[[ChunkRun], int | None]) -> list[ChunkSpan]:
    """Of boxes in a file; `seal_start`: what the seals of a box start from."""
    return [ChunkSpan(run.base, run.stride, run.nbytes, run.count, seal_start(run)) for run in runs]


@dataclass(frozen=True)
class StagedMemory:
    """Shared memory of `size` bytes: a file descriptor that the writer process inherited, or a path (on tmpfs, or
    ``/proc/PID/fd/N``) that it can open."""

    size: int
    fd: int | None = None
    path: str | None = None


class ObjectPath(NamedTuple):
    """An object in a store, that is there or is to be made."""

    store: str
    path: str


@dataclass(frozen=True)
class Answer:
    """How a job goes. Neither `done` nor `failed`: still under way, with `progress` bytes written so far."""

    job: int
    progress: int = 0
    done: bool = False
    failed: str | None = None
    kind: str = ""  # the name of the exception's type
    errno: int | None = None
    chunk: tuple[int, int] | None = None  # that is not what was written: the number of its run, its number in the run
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        return self.done or self.failed is not None

    def line(self) -> bytes:
        return _line(asdict(self))

    @classmethod
    def parse(cls, line: bytes) -> Answer:
        said = json.loads(line)
        return cls(**said | {"chunk": said["chunk"] and tuple(said["chunk"])})


def request(job: int, op: str, **arguments: Any) -> bytes:
    """The line that asks for `op`."""
    return _line({"job": job, "op": op, **arguments})


def memory(said: dict[str, Any]) -> StagedMemory:
    return StagedMemory(**said)


def spans(said: Sequence[Sequence[int]]) -> list[ChunkSpan]:
    """In order of the file. Raises ValueError where they overlap, for then no order of checksums is right."""
    found = sorted((ChunkSpan(*run) for run in said if run[3]), key=lambda run: run.base)
    for run in found:
        if run.base < 0 or run.nbytes < 1 or (run.number > 1 and run.stride < run.nbytes + run.trailer):
            raise ValueError(f"chunks that overlap themselves: {run}")
    for before, after in pairwise(found):
        if after.base < before.end:
            raise ValueError(f"chunks that overlap: {before}, {after}")
    return found


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"
