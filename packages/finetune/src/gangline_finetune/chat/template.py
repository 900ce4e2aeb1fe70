"""Which part of a rendered chat the assistant said.

A template that marks answers (`{% generation %}`) says so itself. Of another, where an answer begins and ends is found
by rendering the chat up to it: what is added is the answer. A template that writes earlier turns in another way once
more follow has no such place for all answers of a chat, and refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from gangline.data import ChatTemplate, TemplateRefusal

Messages = list[dict[str, Any]]
ROLE = "assistant"


class AnswerSpan(NamedTuple):
    """[start, stop) of the letters that the assistant said. said: where its own words end, before an end token."""

    start: int
    stop: int
    said: int


@dataclass(frozen=True)
class Rendered:
    """A text, and what of it the assistant said."""

    text: str
    answers: tuple[AnswerSpan, ...]


def rendered(template: ChatTemplate, messages: Messages, first: int = 0) -> Rendered:
    """The text of a chat, and what the assistant said in it from message `first` on. Raises TemplateRefusal."""
    if template.marks:
        return _marked(template, messages, first)
    whole, answers = template.render(messages), []
    for number, message in enumerate(messages[first:], first):
        if message["role"] != ROLE:
            continue
        before, with_it = template.render(messages[:number], prompt=True), template.render(messages[: number + 1])
        if not (with_it.startswith(before) and whole.startswith(with_it)):
            raise TemplateRefusal("the template writes earlier turns in another way once more follow")
        behind = _behind(template, [*messages[:number], message])
        said = len(with_it) - len(behind) if with_it.endswith(behind) else len(with_it)
        answers.append(AnswerSpan(len(before), len(with_it), max(said, len(before))))
    return Rendered(whole, tuple(answers))


def rendered_after(template: ChatTemplate, prompt: Messages, answer: Messages) -> Rendered:
    """The text of both, and what of the answer the assistant said. Raises TemplateRefusal."""
    return rendered(template, [*prompt, *answer], len(prompt))


def _marked(template: ChatTemplate, messages: Messages, first: int) -> Rendered:
    whole, marked = template.marked(messages)
    before = template.render(messages[:first]) if first else ""
    if not whole.startswith(before):
        raise TemplateRefusal("the template writes earlier turns in another way once more follow")
    return Rendered(whole, tuple(AnswerSpan(start, stop, stop) for start, stop in marked if start >= len(before)))


def _behind(template: ChatTemplate, messages: Messages) -> str:
    """What the template writes behind the words of the last message: an end token, and often a line's end."""
    word = uuid4().hex
    try:
        text = template.render([*messages[:-1], {**messages[-1], "content": word}])
    except TemplateRefusal:
        return ""
    return text.rpartition(word)[2] if word in text else ""
