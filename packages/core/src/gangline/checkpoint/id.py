"""Id of a checkpoint: the step after which it was saved, and the attempt that saved it. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ID = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


@dataclass(frozen=True, order=True)
class CheckpointId:
    """Id of a checkpoint: ``step-00000012``, and ``step-00000012.2`` in the second attempt."""

    step: int
    attempt: int = 1

    def __str__(self) -> str:
        return f"step-{self.step:08d}" + (f".{self.attempt}" if self.attempt > 1 else "")

    @classmethod
    def parse(cls, text: str) -> CheckpointId | None:
        """Return the id in `text`; None if it is invalid, also with extra zeros (step-000000012)."""
        match = _ID.fullmatch(text)
        id = None if match is None else cls(int(match[1]), int(match[2] or 1))
        return id if str(id) == text else None
