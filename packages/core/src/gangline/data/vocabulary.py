"""A data source's vocabulary: text to tokens and back, and whether the model knows as many tokens. Torch-free."""

from __future__ import annotations

from typing import Any, Protocol

from gangline.errors import Problem


class Codec(Protocol):
    """One vocabulary. Every data source has this, and its configuration may give one without reading data."""

    def encode(self, text: str) -> list[int] | None:
        """The tokens of a text; None: the data is not text."""
        ...

    def decode(self, tokens: list[int]) -> str | None:
        """Tokens as text; None: the data is not text."""
        ...


class RendersChats(Protocol):
    """What writes a conversation as text, as the data of a run has it."""

    name: str
    source: str  # its text

    def render(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """The conversation as text; `prompt`: up to where the assistant's next answer begins."""
        ...


def find_vocabulary_problems(known: int, needed: int, owner: str, why: str) -> list[Problem]:
    """Whether the data has more tokens (`needed`) than `model.vocab_size=known`.

    owner: the option that they come from, as the user typed it; why: how many it has.
    """
    if not needed > known > 0:
        return []
    return [Problem(f"model.vocab_size={known} is too small for {owner}.", why, f"model.vocab_size={needed}")]
