"""What a row that holds a conversation has to be: its messages, and the tools that they may call. Torch-free."""

from __future__ import annotations

import json
from typing import Any

from gangline.errors import UserError
from gangline_basics.data.answers import ASSISTANT

TOOLS = "tools"  # the field of a row


def parse_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of {role, content}, and of an answer `weight` 0 where it is not to be trained on.

    A call of tools may have no words. Raises UserError that names the row.
    """
    if not isinstance(value, list) or not value:
        raise UserError(f"{where} is no conversation: {value!r:.60}.", 'It is a list of {"role": ..., "content": ...}.')
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{where} has a message without a role: {message!r:.60}.")
        content = "" if message.get("content") is None and message.get("tool_calls") else message.get("content")
        if not isinstance(content, str):
            raise UserError(f"{where} has a message whose content is no text: {message!r:.60}.")
        if message["role"] == ASSISTANT and message.get("weight") not in (None, 0, 1):
            raise UserError(
                f"{where} has a message of weight {message['weight']!r:.60}.",
                "An answer of weight 0 is not trained on, one of weight 1 is.",
                "Write 0 or 1, or leave the weight out.",
            )
        messages.append({key: one for key, one in {**message, "content": content}.items() if one is not None})
    return messages


def parse_tools(row: dict[str, Any], where: str) -> list[Any] | None:
    """The tools that a row's conversation may call: its field `tools`, a list of objects, or either as JSON.

    None where it names none. Raises UserError that names the row.
    """
    value = row.get(TOOLS)
    try:
        entries = json.loads(value) if isinstance(value, str) and value.strip() else value or None
        tools = [json.loads(one) if isinstance(one, str) else one for one in entries or ()]
    except (TypeError, ValueError, RecursionError):
        tools = [None]
    if not all(isinstance(one, dict) for one in tools):
        raise UserError(
            f"{where} has tools that are none: {value!r:.60}.",
            "They are a list of objects, as JSON schema has functions, or the same as JSON; a template writes them.",
            f"Take the field {TOOLS} out of the rows, and no prompt names any.",
        )
    return tools or None


def drop_nulls(value: Any) -> Any:
    """What a column of Parquet holds, without the fields of objects that it fills with null where others have them."""
    if isinstance(value, dict):
        return {name: drop_nulls(one) for name, one in value.items() if one is not None}
    return [drop_nulls(one) for one in value] if isinstance(value, list) else value
