"""Rendering of conversations as text by a tokenizer's chat template.

A template is Jinja as transformers renders it: in an immutable sandbox, with `messages`, the `tools` of a
conversation or none, no `documents`, `add_generation_prompt`, the tokenizer's special tokens and `raise_exception`.
Templates do not get the date, because another day would produce other tokens for the same conversation.
"""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from gangline.errors import UserError
from gangline_basics.data.named_tokens import CONFIG, read_object, read_special_tokens

Spans = tuple[tuple[int, int], ...]  # [start, stop) in characters


class TemplateRefusal(Exception):
    """Error of a template that refuses a conversation; its message is the reason."""


class ChatTemplate:
    """Compiled chat template. Raises UserError if the source is not a valid template.

    special  name of a special token, such as bos_token -> its text
    marks    whether the template marks the assistant's answers by `{% generation %}`
    """

    def __init__(self, source: str, special: dict[str, str], name: str) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment

            from gangline_basics.data.chat_tags import MARK, GenerationTag
        except ImportError as error:
            raise UserError("chat templates need jinja2.", "", "pip install 'gangline-basics[chat]'") from error
        self.source, self.name, self.special, self._error = source, name, special, TemplateError
        self._mark, self._tools = MARK, cast("list[Any] | None", None)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
        )
        environment.globals.update(raise_exception=self._raise)
        environment.filters["tojson"] = _dump_json
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # the compiler evaluates constants; deep nesting raises RecursionError
            raise UserError(f"{name} is not a valid chat template.", f"{type(error).__name__}: {error}") from error
        tag = environment.extensions[GenerationTag.identifier]
        self.marks = isinstance(tag, GenerationTag) and tag.seen

    def bind_tools(self, tools: list[Any] | None) -> ChatTemplate:
        """Return a copy of the template that renders conversations with the JSON objects `tools`; None: no tools."""
        if not tools:
            return self
        template = copy(self)
        template._tools = tools
        return template

    def render(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        """Return the conversation as text; with `prompt`, up to where the assistant's next answer begins.

        Raises TemplateRefusal if the template refuses the conversation.
        """
        return self._render(messages, prompt, {})

    def render_marked(self, messages: list[dict[str, Any]]) -> tuple[str, Spans]:
        """Return the conversation as text, and the spans of answers that the template marks. Raises TemplateRefusal."""
        mark, text, spans = uuid4().hex, "", []
        for number, part in enumerate(self._render(messages, False, {self._mark: mark}).split(mark)):
            if number % 2:
                spans.append((len(text), len(text) + len(part)))
            text += part
        if text != self.render(messages):
            raise TemplateRefusal("the template changes the text of answers that it marks")
        return text, tuple(spans)

    def _render(self, messages: list[dict[str, Any]], prompt: bool, more: dict[str, str]) -> str:
        words = {**self.special, **more}
        try:
            return self._template.render(
                messages=messages, tools=self._tools, documents=None, add_generation_prompt=prompt, **words
            )
        except Exception as error:  # a template is a third-party program: any exception that it raises is a refusal
            known = isinstance(error, self._error)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            if "strftime_now" in reason:
                reason += ": the template requests the date, so the same text would have other tokens on another day; "
                reason += "use a copy of the template with a fixed date (data.template=FILE)"
            raise TemplateRefusal(reason) from error

    def _raise(self, message: str) -> None:
        raise self._error(message)


def _dump_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def read_template(tokenizer: str | None, template: str | None = None) -> ChatTemplate:
    """Return the chat template in the file `template`, or next to a tokenizer.json. Raises UserError without one.

    tokenizer: path of the tokenizer.json; None: text is byte-level, so `template` must name a file.
    """
    beside = None if tokenizer is None else Path(tokenizer).expanduser().parent
    special = {} if beside is None else read_special_tokens(beside)
    file = None if beside is None else beside / "chat_template.jinja"
    if template is not None:
        return ChatTemplate(_read_text(Path(template).expanduser()), special, template)
    if file is not None and file.is_file():
        return ChatTemplate(_read_text(file), special, str(file))
    source = None if beside is None else read_object(beside / CONFIG).get("chat_template")
    if isinstance(source, list) and all(isinstance(one, dict) for one in source):  # a list of named templates
        defaults = [one for one in source if one.get("name") == "default"]
        source = defaults[0].get("template", "") if defaults else None
    if not isinstance(source, str | None):
        raise UserError(
            f"{beside}/{CONFIG}: chat_template is invalid: {source!r:.60}.",
            'Required: a text, or a list of {"name": ..., "template": ...}; the template named default is used.',
        )
    if isinstance(source, str):
        return ChatTemplate(source, special, f"{beside}/{CONFIG}")
    raise UserError(
        f"a chat template is missing for {tokenizer or 'byte-level text'}.",
        "A chat template is read from chat_template.jinja or tokenizer_config.json, next to tokenizer.json.",
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError("the chat template cannot be read.", f"{path}: {error}") from error
