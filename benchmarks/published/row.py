"""Read the fields of a published measurement as text and as numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

MOST = 1e100  # maximum of any measured number
COUNTS = (
    *("tp", "pp", "cp", "dp", "ep", "vp", "n_gpus", "nodes", "gpus_per_node"),
    *("seq", "micro_batch", "local_batch", "grad_acc"),
)
MOST_COUNTED = 10**7
PLAIN_NUMBER = re.compile(r"\s*\d[\d,]*(\.\d+)?\s*")


class Unjudged(Exception):
    """Raised for a row that cannot be judged; the message is the reason."""


@dataclass(frozen=True)
class Row:
    """A published measurement with the fields of its file."""

    fields: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def text(self, *names: str) -> str:
        """Return the fields as lower-case text; a missing field is empty."""
        return " ".join(str(self.get(name) or "") for name in names).lower()

    def matches(self, name: str, pattern: str) -> bool:
        return re.search(pattern, self.text(name)) is not None

    @cached_property
    def credits(self) -> str:
        """Return the text that names the software of a run."""
        return self.text("source", "notes", "technique", "table")

    def cites(self, pattern: str) -> bool:
        return re.search(pattern, self.credits) is not None

    def is_model(self, pattern: str) -> bool:
        return re.search(pattern, self.text("model").replace("-", "")) is not None

    def runs_on(self, gpu: str) -> bool:
        """Return whether the field `gpu` matches; `b200` does not match GB200."""
        return self.matches("gpu", rf"(?<!g)({gpu})")

    def number(self, name: str) -> float | None:
        """Return a field as a positive number, also if it is text; None if it is not a positive number."""
        value = self.get(name)
        if isinstance(value, str) and PLAIN_NUMBER.fullmatch(value):
            value = float(value.replace(",", ""))
        known = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if known and 0 < value < MOST else None

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a field as a positive integer. Raises Unjudged if the field is missing and has no default."""
        value = self.number(name)
        if value is not None:
            return int(value)
        if default is None:
            raise Unjudged(f"{name} is not published as a number")
        return default

    def check_counts(self) -> None:
        """Raise Unjudged for a count that is not a plain number, because it must not be treated as missing."""
        for name in COUNTS:
            value, found = self.get(name), self.number(name)
            absent = value is None or value == ""
            if not absent and (found is None or found % 1 or found > MOST_COUNTED):
                raise Unjudged(f"{name} is {value!r}; expected an integer from 1 to {MOST_COUNTED:,}")
        batch = self.get("global_batch")  # text if the batch size grows during the run
        if isinstance(batch, int | float) and not 1 <= batch <= MOST_COUNTED:
            raise Unjudged(f"global_batch is {batch!r}; expected a number from 1 to {MOST_COUNTED:,}")
