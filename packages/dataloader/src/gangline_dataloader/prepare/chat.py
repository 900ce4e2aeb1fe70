"""Which part of a conversation, as its template writes it, the assistant said.

Where an answer begins and ends is found by rendering the conversation up to it: what is added is the answer. Templates
whose earlier turns look otherwise once more follow (some leave out what was thought) make no such conversation of
several answers; it is dropped, and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gangline.data import ChatTemplate, TemplateRefusal
from gangline_dataloader.prepare.rule import Dropped

ROLE = "assistant"


@dataclass(frozen=True)
class Conversation:
    """A text and [start, stop) of the letters in it that are to be learnt."""

    text: str
    answers: tuple[tuple[int, int], ...]


def conversation(template: ChatTemplate, messages: list[dict[str, Any]]) -> Conversation | Dropped:
    """The text, and what the assistant said in it."""
    if not any(message["role"] == ROLE for message in messages):
        return Dropped("chat: no answer")
    answers = []
    try:
        text = template.render(messages)
        for number, message in enumerate(messages):
            if message["role"] != ROLE:
                continue
            before, with_it = template.render(messages[:number], prompt=True), template.render(messages[: number + 1])
            if not (with_it.startswith(before) and text.startswith(with_it)):
                return Dropped("chat: the template changes earlier turns")
            answers.append((len(before), len(with_it)))
    except TemplateRefusal as error:
        return Dropped(f"chat: {error}"[:80])
    return Conversation(text, tuple(answers))
