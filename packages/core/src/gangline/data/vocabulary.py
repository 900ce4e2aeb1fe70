"""Vocabulary of a data source: text to tokens and back, and a check of the model's vocabulary size. Torch-free."""

from __future__ import annotations

from typing import Any, Protocol

from gangline.errors import Problem


class Codec(Protocol):
    """Contract of a vocabulary. Every data source has one; its configuration may return one without reading data."""

    def encode(self, text: str) -> list[int] | None:
        """Return the tokens of a text; None if the data is not text."""
        ...

    def decode(self, tokens: list[int]) -> str | None:
        """Return tokens as text; None if the data is not text."""
        ...


class RendersChats(Protocol):
    """Contract of a chat template, which renders a conversation as text like the data of a run."""

    name: str
    source: str  # text of the template

    def render(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """Return the conversation as text; `prompt`: up to the start of the assistant's next answer."""
        ...


def find_vocabulary_problems(known: int, needed: int, owner: str, why: str) -> list[Problem]:
    """Return a problem if the data has more tokens (`needed`) than `model.vocab_size=known`.

    owner: the option with these tokens, as the user typed it; why: how many it has.
    """
    if not needed > known > 0:
        return []
    return [Problem(f"model.vocab_size={known} is too small for {owner}.", why, f"model.vocab_size={needed}")]
