"""Type of a cleaning rule: a function that returns the cleaned text, or the reason why the document is dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Dropped:
    """The reason why a document is dropped, as a label in the report."""

    why: str


Rule = Callable[[str], str | Dropped]
