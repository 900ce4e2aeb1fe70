"""Format of a data row with a conversation: messages, and the tools that they may call. Torch-free."""

from __future__ import annotations

import json
from typing import Any

from gangline.errors import UserError
from gangline_basics.data.answers import ASSISTANT

TOOLS = "tools"  # field of a row that lists tools


def parse_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return the validated messages of a row, as dicts with role, content and any other fields.

    The content may be missing in a message with tool calls. Raises UserError that names the row.
    """
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{where} is not a conversation: {value!r:.60}.", 'Required: a list of {"role": ..., "content": ...}.'
        )
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{where} has a message without a role: {message!r:.60}.")
        content = "" if message.get("content") is None and message.get("tool_calls") else message.get("content")
        if not isinstance(content, str):
            raise UserError(f"{where} has a message whose content is not a string: {message!r:.60}.")
        if message["role"] == ASSISTANT and message.get("weight") not in (None, 0, 1):
            raise UserError(
                f"{where} has a message with weight {message['weight']!r:.60}.",
                "Weight 0 excludes an answer from the loss, and weight 1 includes the answer.",
                "Set the weight to 0 or 1, or remove the field weight.",
            )
        messages.append({key: one for key, one in {**message, "content": content}.items() if one is not None})
    return messages


def parse_tools(row: dict[str, Any], where: str) -> list[Any] | None:
    """Return the tools that a row's conversation may call, or None if the row lists no tools.

    The field `tools` is a list of objects; the list and the objects may be JSON strings. Raises UserError that names
    the row.
    """
    value = row.get(TOOLS)
    try:
        entries = json.loads(value) if isinstance(value, str) and value.strip() else value or None
        tools = [json.loads(one) if isinstance(one, str) else one for one in entries or ()]
    except (TypeError, ValueError, RecursionError):
        tools = [None]
    if not all(isinstance(one, dict) for one in tools):
        raise UserError(
            f"{where} has an invalid field {TOOLS}: {value!r:.60}.",
            "Required: a list of objects, each describing a function by JSON Schema, or such a list as a JSON string.",
            f"To train without tools, remove the field {TOOLS} from the rows.",
        )
    return tools or None


def drop_nulls(value: Any) -> Any:
    """Return a Parquet value without the null fields of objects, which Parquet adds if other rows have the fields."""
    if isinstance(value, dict):
        return {name: drop_nulls(one) for name, one in value.items() if one is not None}
    return [drop_nulls(one) for one in value] if isinstance(value, list) else value
