"""Conversations as text: a tokenizer's own chat template.

A template is Jinja as transformers renders it: in a sandbox that changes nothing, with `messages`,
`add_generation_prompt`, the special tokens of tokenizer_config.json and `raise_exception`; it is not told the date, for
another day would make other tokens of the same text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gangline.errors import UserError


class TemplateRefusal(Exception):
    """What a template says of a conversation that it does not take."""


class ChatTemplate:
    """One template. special: names of special tokens, such as bos_token, and the words for them.

    Raises UserError where it is none.
    """

    def __init__(self, source: str, special: dict[str, str], name: str) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment

            from gangline.data.chat_tags import GenerationTag
        except ImportError as error:
            raise UserError("chat templates need jinja2.", "", "pip install 'gangline[chat]'") from error
        self.source, self.name, self.special, self._error = source, name, special, TemplateError
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
        )
        environment.globals.update(raise_exception=self._raise)
        environment.filters["tojson"] = _tojson
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(f"{name} is no chat template.", str(error)) from error

    def render(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """The conversation as text; `prompt`: up to where the assistant's next answer begins.

        Raises TemplateRefusal where the template does not take it.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=prompt, **self.special)
        except self._error as error:
            raise TemplateRefusal(str(error)) from error

    def _raise(self, message: str) -> None:
        raise self._error(message)


def _tojson(value: Any, indent: int | None = None, **asked: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def template_of(tokenizer: str | None, template: str | None = None) -> ChatTemplate:
    """The template in a file, or the one beside a tokenizer.json. Raises UserError where there is none.

    tokenizer: path of the tokenizer.json; None: text is bytes, and no template lies beside them.
    """
    config: dict[str, Any] = {}
    beside = None if tokenizer is None else Path(tokenizer).expanduser().parent
    try:
        if beside is not None and (beside / "tokenizer_config.json").exists():
            config = json.loads((beside / "tokenizer_config.json").read_bytes())
        if template is not None:
            return ChatTemplate(Path(template).expanduser().read_text(), _special(config), template)
        if beside is not None and (beside / "chat_template.jinja").exists():
            path = beside / "chat_template.jinja"
            return ChatTemplate(path.read_text(), _special(config), str(path))
    except (OSError, ValueError) as error:
        raise UserError("the chat template cannot be read.", str(error)) from error
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    if beside is not None and isinstance(found, str):
        return ChatTemplate(found, _special(config), str(beside / "tokenizer_config.json"))
    raise UserError(
        f"{tokenizer or 'text of bytes'} has no chat template.",
        "It lies beside a tokenizer.json, as chat_template.jinja or in tokenizer_config.json.",
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
