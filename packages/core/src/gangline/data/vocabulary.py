"""Vocabulary of a data source: encode and decode text, and check the model's vocabulary size. Torch-free."""

from __future__ import annotations

from typing import Any, Protocol

from gangline.errors import Problem


class Codec(Protocol):
    """Contract of a vocabulary. Every data source has a codec; its configuration may return one without data."""

    def encode(self, text: str) -> list[int] | None:
        """Return the tokens of a text; None if the data is not text."""
        ...

    def decode(self, tokens: list[int]) -> str | None:
        """Return tokens as text; None if the data is not text."""
        ...


class RendersChats(Protocol):
    """Contract of a chat template, which renders a conversation as text in the format of a run's data."""

    name: str
    source: str  # text of the template

    def render(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """Return the conversation as text. prompt: whether to append the start of the assistant's next answer."""
        ...


def find_vocabulary_problems(known: int, needed: int, owner: str, why: str) -> list[Problem]:
    """Return a problem if the data's vocabulary (`needed` tokens) is larger than `model.vocab_size=known`.

    owner: option of the tokenizer or data, as the user typed it. why: reason, with the number of tokens.
    """
    if not needed > known > 0:
        return []
    return [Problem(f"model.vocab_size={known} is too small for {owner}.", why, f"model.vocab_size={needed}")]
