"""Which part of a rendered chat the assistant said.

Where an answer begins and ends is found by rendering the chat up to it: what is added is the answer. A template that
writes earlier turns in another way once more follow has no such place for all answers of a chat, and refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gangline.data import ChatTemplate, TemplateRefusal

Messages = list[dict[str, Any]]
ROLE = "assistant"


@dataclass(frozen=True)
class Rendered:
    """A text and [start, stop) of the letters in it that the assistant said."""

    text: str
    answers: tuple[tuple[int, int], ...]


def rendered(template: ChatTemplate, messages: Messages) -> Rendered:
    """The text of a chat, and what the assistant said in it. Raises TemplateRefusal."""
    whole, answers = template.render(messages), []
    for number, message in enumerate(messages):
        if message["role"] != ROLE:
            continue
        before, with_it = template.render(messages[:number], prompt=True), template.render(messages[: number + 1])
        if not (with_it.startswith(before) and whole.startswith(with_it)):
            raise TemplateRefusal("the template writes earlier turns in another way once more follow")
        answers.append((len(before), len(with_it)))
    return Rendered(whole, tuple(answers))


def rendered_after(template: ChatTemplate, prompt: Messages, answer: Messages) -> Rendered:
    """The text of both; what follows the prompt is the answer. Raises TemplateRefusal."""
    before, whole = template.render(prompt, prompt=True), template.render([*prompt, *answer])
    if not whole.startswith(before):
        raise TemplateRefusal("the template writes a prompt in another way once an answer follows")
    return Rendered(whole, ((len(before), len(whole)),))
