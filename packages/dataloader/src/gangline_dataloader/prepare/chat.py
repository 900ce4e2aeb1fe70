"""Conversations as text: the tokenizer's own chat template, and which part of what it writes the assistant said.

A template is Jinja as transformers renders it: in a sandbox that changes nothing, with `messages`,
`add_generation_prompt`, the special tokens of tokenizer_config.json and `raise_exception`; it is not told the date, for
another day would make other tokens of the same text. Where an answer begins and ends is found by rendering the
conversation up to it: what is added is the answer. Templates whose earlier turns look otherwise once more follow (some
leave out what was thought) make no such conversation of several answers; it is dropped, and counted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline import UserError
from gangline_dataloader.prepare.rule import Dropped

ROLE = "assistant"


@dataclass(frozen=True)
class Conversation:
    """A text and [start, stop) of the letters in it that are to be learnt."""

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """One template. Raises UserError where it is none."""

    def __init__(self, source: str, special: dict[str, str], name: str) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise UserError("--chat needs jinja2.", "", "pip install 'gangline-dataloader[chat]'") from error
        self.source, self.name, self.special, self._error = source, name, special, TemplateError
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals.update(raise_exception=self._raise)
        environment.filters["tojson"] = _tojson
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(f"{name} is no chat template.", str(error)) from error

    def render(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """The conversation as text; `prompt`: up to where the assistant's next answer begins."""
        return self._template.render(messages=messages, add_generation_prompt=prompt, **self.special)

    def conversation(self, messages: list[dict[str, Any]]) -> Conversation | Dropped:
        """The text, and what the assistant said in it."""
        if not any(message["role"] == ROLE for message in messages):
            return Dropped("chat: no answer")
        answers = []
        try:
            text = self.render(messages)
            for number, message in enumerate(messages):
                if message["role"] != ROLE:
                    continue
                before, with_it = self.render(messages[:number], prompt=True), self.render(messages[: number + 1])
                if not (with_it.startswith(before) and text.startswith(with_it)):
                    return Dropped("chat: the template changes earlier turns")
                answers.append((len(before), len(with_it)))
        except self._error as error:
            return Dropped(f"chat: {error}"[:80])
        return Conversation(text, tuple(answers))

    def _raise(self, message: str) -> None:
        raise self._error(message)


def _tojson(value: Any, indent: int | None = None, **asked: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def find(tokenizer: str, template: str | None) -> ChatTemplate:
    """The template in a file, or the one beside a tokenizer.json. Raises UserError where there is none."""
    config: dict[str, Any] = {}
    beside = Path(tokenizer).expanduser().parent
    try:
        if (beside / "tokenizer_config.json").exists() and tokenizer != "bytes":
            config = json.loads((beside / "tokenizer_config.json").read_bytes())
        if template is not None:
            return ChatTemplate(Path(template).expanduser().read_text(), _special(config), template)
        if tokenizer != "bytes" and (beside / "chat_template.jinja").exists():
            path = beside / "chat_template.jinja"
            return ChatTemplate(path.read_text(), _special(config), str(path))
    except (OSError, ValueError) as error:
        raise UserError("the chat template cannot be read.", str(error)) from error
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    if isinstance(found, str):
        return ChatTemplate(found, _special(config), str(beside / "tokenizer_config.json"))
    raise UserError(
        f"--tokenizer {tokenizer} has no chat template.",
        "It lies beside a tokenizer.json, as chat_template.jinja or in tokenizer_config.json.",
        "--chat-template FILE",
    )


def _special(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like, which are words or objects with their content."""
    found = {}
    for name, value in config.items():
        if name.endswith("_token") and value is not None and not isinstance(value, bool):
            found[name] = value["content"] if isinstance(value, dict) else str(value)
    return found


def messages_of(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of {role, content}. Raises UserError that names the row."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{where} is no conversation: {value!r:.60}.", 'It is a list of {"role": ..., "content": ...}.')
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{where} has a message without a role: {message!r:.60}.")
        if not isinstance(message.get("content"), str):
            raise UserError(f"{where} has a message whose content is no text: {message!r:.60}.")
    return [{key: one for key, one in message.items() if one is not None} for message in value]
