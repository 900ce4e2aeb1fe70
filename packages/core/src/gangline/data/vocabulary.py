"""Text to tokens and back, for who asks a run for text. Torch-free."""

from __future__ import annotations

from typing import Protocol


class Codec(Protocol):
    """One vocabulary. Every data source has this, and its configuration may give one without reading data."""

    def encode(self, text: str) -> list[int] | None:
        """The tokens of a text; None: the data is not text."""
        ...

    def decode(self, tokens: list[int]) -> str | None:
        """Tokens as text; None: the data is not text."""
        ...
