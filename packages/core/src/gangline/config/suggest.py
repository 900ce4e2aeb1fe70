"""Did you mean?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A question that names what comes closest to `word`, or "" where nothing is near."""
    close = difflib.get_close_matches(word, list(known), 1, cutoff)
    return f"Did you mean {close[0]}?" if close else ""
