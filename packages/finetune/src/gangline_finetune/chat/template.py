"""Conversations as text: the tokenizer's own chat template, and which part of what it writes the assistant said.

A template is Jinja as transformers renders it, in a sandbox that changes nothing. It is not told the date: another day
would make other tokens of the same chat. Where an answer begins and ends is found by rendering the chat up to it: what
is added is the answer. A template that writes earlier turns in another way once more follow has no such place for all
answers of a chat.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gangline import UserError

Messages = list[dict[str, Any]]
ROLE = "assistant"


@dataclass(frozen=True)
class Rendered:
    """A text and [start, stop) of the letters in it that the assistant said."""

    text: str
    answers: tuple[tuple[int, int], ...]


class Unrenderable(Exception):
    """A chat that the template cannot write."""


class _Generation(Extension):
    """`{% generation %}` marks answers for transformers; what is in it is written as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class JinjaTemplate:
    """One template. Raises UserError where it is none. where: what it was read from, for messages."""

    def __init__(self, source: str, special: dict[str, str], where: str) -> None:
        self.source, self.special, self.where = source, special, where
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.globals.update(raise_exception=_refused)
        environment.filters["tojson"] = _tojson
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(f"{where} is no chat template.", str(error)) from error

    def text(self, messages: Messages, prompt: bool = False) -> str:
        """The chat as text; `prompt`: up to where the next answer begins. Raises Unrenderable."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=prompt, **self.special)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise Unrenderable(str(error) or type(error).__name__) from error

    def rendered(self, messages: Messages) -> Rendered:
        """The text, and what the assistant said in it. Raises Unrenderable."""
        whole, answers = self.text(messages), []
        for number, message in enumerate(messages):
            if message["role"] != ROLE:
                continue
            before, with_it = self.text(messages[:number], prompt=True), self.text(messages[: number + 1])
            if not (with_it.startswith(before) and whole.startswith(with_it)):
                raise Unrenderable("the template writes earlier turns in another way once more follow")
            answers.append((len(before), len(with_it)))
        return Rendered(whole, tuple(answers))


def find(tokenizer: str, template: str | None) -> JinjaTemplate:
    """The template in a file, or the one beside a tokenizer.json. Raises UserError where there is none."""
    beside = Path(tokenizer).expanduser().parent
    own, config_path = beside / "chat_template.jinja", beside / "tokenizer_config.json"
    try:
        config: dict[str, Any] = json.loads(config_path.read_text()) if config_path.exists() else {}
        special = special_tokens(config)
        for path in [own] if template is None else [Path(template).expanduser()]:
            if template is not None or path.exists():
                return JinjaTemplate(path.read_text(), special, str(path))
    except (OSError, ValueError) as error:
        raise UserError("the chat template cannot be read.", str(error)) from error
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    if isinstance(found, str):
        return JinjaTemplate(found, special, str(config_path))
    raise UserError(
        f"data.tokenizer={tokenizer} has no chat template.",
        "It lies beside a tokenizer.json, as chat_template.jinja or in tokenizer_config.json.",
        "data.template=FILE names one.",
    )


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like of a tokenizer_config.json, where they are words or objects with their content."""
    found = {}
    for name, value in config.items():
        if name.endswith("_token") and value is not None and not isinstance(value, bool):
            found[name] = value["content"] if isinstance(value, dict) else str(value)
    return found


def _refused(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
