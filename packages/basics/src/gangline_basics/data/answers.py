"""Assistant answers in a rendered conversation, for loss masking.

A template that marks answers by `{% generation %}` gives their spans directly. For any other template, the conversation
is rendered up to the answer, once without and once with the answer; the added text is the answer. This fails if the
template renders earlier turns differently when more turns follow; then the conversation is refused. An answer of
`weight` 0 is not trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from gangline_basics.data.chat import ChatTemplate, TemplateRefusal
from gangline_basics.data.formats import has_half_character

Messages = list[dict[str, Any]]
ASSISTANT = "assistant"  # the role whose messages are trained on
REASONING = ("reasoning_content", "reasoning", "thinking")  # fields of a message in which data sets store reasoning
CHANGES = "the template renders earlier turns differently if more turns follow"
# Two placeholder answers. They occur in no template, differ in the first character, and are digits, which no Jinja
# filter changes.
_OTHER = tuple(f"{first}{uuid4().int}" for first in (1, 2))
HALF_CHARACTER = "the text contains half of a surrogate pair"


class AnswerSpan(NamedTuple):
    """Characters [start, stop) of an answer in the rendered text. content_stop: end of its text before an end token."""

    start: int
    stop: int
    content_stop: int


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as rendered text, and the spans of the assistant's answers in the text."""

    text: str
    answers: tuple[AnswerSpan, ...]


def render_chat(template: ChatTemplate, messages: Messages, first: int = 0) -> RenderedChat:
    """Return the rendered text and the spans of the answers from message `first` on, except answers of weight 0.

    Raises TemplateRefusal if the template refuses the conversation or the spans of its answers cannot be found, and for
    text that no tokenizer accepts.
    """
    chat = (_read_marks if template.marks else _find_answers)(template, messages, first)
    _check_calls(template, messages, chat.text)
    _check_reasoning(template, messages, chat.text, first)
    if has_half_character(chat.text):
        raise TemplateRefusal(HALF_CHARACTER)
    return chat


def is_trained_on(message: dict[str, Any]) -> bool:
    """Return whether a message is an answer that contributes to the loss."""
    return message["role"] == ASSISTANT and message.get("weight", 1) != 0


def _check_calls(template: ChatTemplate, messages: Messages, text: str) -> None:
    """Raise TemplateRefusal if the text omits tool calls: training would teach answers without tool calls."""
    for number, message in enumerate(messages):
        if not message.get("tool_calls"):
            continue
        without = {name: value for name, value in message.items() if name != "tool_calls"}
        try:
            same = template.render([*messages[:number], without, *messages[number + 1 :]]) == text
        except TemplateRefusal:  # the template refuses a message with neither text nor tool calls
            continue
        if same:
            raise TemplateRefusal("the template omits tool calls")


def _check_reasoning(template: ChatTemplate, messages: Messages, text: str, first: int) -> None:
    """Raise TemplateRefusal if the text omits reasoning of an answer or tool call since the last user message.

    Templates omit the reasoning of earlier turns on purpose. Reasoning is a text, or a list of parts with texts.
    """
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    for number in range(max(first, users[-1] if users else 0), len(messages)):
        message = messages[number]
        if not is_trained_on(message):
            continue
        for name in REASONING:
            for rest in _iterate_rests(message.get(name), text):
                without = {key: value for key, value in {**message, name: rest}.items() if key != name or value}
                try:
                    same = template.render([*messages[:number], without, *messages[number + 1 :]]) == text
                except TemplateRefusal:  # the template refuses an answer without reasoning
                    continue
                if same:
                    raise TemplateRefusal(f"the template omits the field {name}")


def _iterate_rests(reasoning: Any, text: str) -> Iterator[Any]:
    """Yield, for each part of the reasoning with a string that `text` lacks, the reasoning without that part."""
    parts = reasoning if isinstance(reasoning, list) else [reasoning]
    for number, part in enumerate(parts):
        if any(one.strip() not in text for one in _list_texts(part)):
            yield [*parts[:number], *parts[number + 1 :]]


def _list_texts(value: Any) -> list[str]:
    """Return all strings in a part of reasoning, except the values of `type`."""
    if isinstance(value, dict):
        return [text for name, one in value.items() if name != "type" for text in _list_texts(one)]
    if isinstance(value, list):
        return [text for one in value for text in _list_texts(one)]
    return [value] if isinstance(value, str) else []


def _find_answers(template: ChatTemplate, messages: Messages, first: int) -> RenderedChat:
    whole, answers = template.render(messages), []
    for number, message in enumerate(messages[first:], first):
        if not is_trained_on(message):
            continue
        before, with_it = _render_before(template, messages[: number + 1]), template.render(messages[: number + 1])
        if not (with_it.startswith(before) and whole.startswith(with_it)):
            raise TemplateRefusal(CHANGES)
        behind = _render_behind(template, messages[: number + 1])
        content_stop = len(with_it) if behind is None or not with_it.endswith(behind) else len(with_it) - len(behind)
        answers.append(AnswerSpan(len(before), len(with_it), max(content_stop, len(before))))
    return RenderedChat(whole, tuple(answers))


def _read_marks(template: ChatTemplate, messages: Messages, first: int) -> RenderedChat:
    whole, marked = template.render_marked(messages)
    answers = [message for message in messages if message["role"] == ASSISTANT]
    if not all(map(is_trained_on, answers)):
        if len(answers) != len(marked):
            raise TemplateRefusal("answers have weight 0, and the template does not mark each answer once")
        marked = tuple(span for span, message in zip(marked, answers, strict=True) if is_trained_on(message))
    before = template.render(messages[:first]) if first else ""
    if not whole.startswith(before):
        raise TemplateRefusal(CHANGES)
    return RenderedChat(whole, tuple(AnswerSpan(start, stop, stop) for start, stop in marked if start >= len(before)))


def _render_before(template: ChatTemplate, messages: Messages) -> str:
    """Return the text that the template writes before the last message, which is an answer.

    If the template refuses the conversation without that answer (some templates require a first message), return the
    common prefix of the conversation rendered with two different answers.
    """
    try:
        return template.render(messages[:-1], prompt=True)
    except TemplateRefusal:
        one, other = (template.render([*messages[:-1], {**messages[-1], "content": word}]) for word in _OTHER)
        differs = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if differs is None:
            raise
        return one[:differs]


def _render_behind(template: ChatTemplate, messages: Messages) -> str | None:
    """Return the text that the template writes after the last message, an answer: an end token, and often a newline.

    Returns None if the text cannot be found. The conversation is rendered with a plain answer in place of the last
    message, because the last message may have tool calls after its content.
    """
    word = _OTHER[0]
    for answer in ({"role": ASSISTANT}, messages[-1]):
        try:
            text = template.render([*messages[:-1], {**answer, "content": word}])
        except TemplateRefusal:
            continue
        if word in text:
            return text.rpartition(word)[2]
    return None
