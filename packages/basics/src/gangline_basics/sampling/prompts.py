"""Prompts from a file: one per line, or JSON lines. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gangline.errors import UserError
from gangline_basics.data.chat_rows import parse_messages
from gangline_basics.data.formats import is_lines

Prompt = str | list[dict[str, Any]]  # a text, or a conversation


def read_prompts(path: str | Path) -> list[Prompt]:
    """Return the prompts of a file, in order, without empty lines.

    In a .jsonl each line is a string, {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}.
    Raises UserError that names the line.
    """
    try:
        text = Path(path).expanduser().read_bytes().decode()
    except (OSError, ValueError) as error:
        raise UserError(f"--prompts {path} cannot be read.", str(error)) from error
    of_json = is_lines(str(path))
    lines = [line.removesuffix("\r") for line in text.split("\n")]  # `splitlines` also splits inside JSON strings
    prompts = [
        _parse_prompt(line, f"{path}:{n}") if of_json else line for n, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise UserError(
            f"--prompts {path} contains no prompts.", "Each line is a prompt; in a .jsonl, each line is JSON."
        )
    return prompts


def _parse_prompt(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON.", str(error)) from error
    if isinstance(value, dict) and "messages" in value:
        return parse_messages(value["messages"], where)
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UserError(
            f"{where} is not a prompt: {line:.60}", 'Write "...", {"prompt": "..."} or {"messages": [...]}.'
        )
    return text


def check_lengths(prompts: Sequence[Sequence[int]], tokens: int, context: int) -> None:
    """Raise UserError for an empty prompt, or if prompt and new tokens exceed the trained context length `context`."""
    for number, prompt in enumerate(prompts, 1):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        if not prompt:
            raise UserError(f"{which} has no tokens.", "A model needs at least one token to continue.")
        if len(prompt) + tokens > context:
            rest = context - len(prompt)
            raise UserError(
                f"{which} of {len(prompt)} tokens and {tokens} new tokens exceed the context of {context} tokens.",
                "The model was trained on sequences of batch.sequence_length tokens, not on later positions.",
                f"Generate at most {rest} tokens." if rest > 0 else "Use a shorter prompt.",
            )
