"""A rule of cleaning: text in, text out, or why the document is dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Dropped:
    """Why a document is not kept, as a word for the report."""

    why: str


Rule = Callable[[str], str | Dropped]
