"""Messages between the trainer and its writer process: one JSON object per line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class StagedMemory:
    """Shared memory of `size` bytes: an inherited file descriptor, or a path (on tmpfs, or ``/proc/PID/fd/N``)."""

    size: int
    fd: int | None = None
    path: str | None = None


@dataclass(frozen=True)
class Answer:
    """State of a job. If neither `done` nor `failed` is set, the job is running, with `progress` bytes written."""

    job: int
    progress: int = 0
    done: bool = False
    failed: str | None = None
    kind: str = ""  # the name of the exception's type
    errno: int | None = None
    chunk: tuple[int, int] | None = None  # bad chunk: the number of its run, its number in the run
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        return self.done or self.failed is not None

    def encode(self) -> bytes:
        return _encode_line(asdict(self))

    @classmethod
    def parse(cls, line: bytes) -> Answer:
        fields = json.loads(line)
        return cls(**fields | {"chunk": fields["chunk"] and tuple(fields["chunk"])})


def encode_request(job: int, op: str, **arguments: Any) -> bytes:
    """Return the line that requests the operation `op`."""
    return _encode_line({"job": job, "op": op, **arguments})


def parse_memory(fields: dict[str, Any]) -> StagedMemory:
    return StagedMemory(**fields)


def _encode_line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
