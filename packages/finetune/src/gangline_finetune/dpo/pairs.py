"""A row of a file as a pair of chats. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gangline import UserError
from gangline.data import messages_of
from gangline_finetune.chat.rows import field_of
from gangline_finetune.chat.template import ROLE, Messages


@dataclass(frozen=True)
class Pair:
    """Two ways on from one prompt."""

    prompt: Messages
    chosen: Messages
    rejected: Messages


def pair_of(row: dict[str, Any], where: str) -> Pair:
    """The pair of a row. Raises UserError, naming it, for one that is empty or whose answers are equal."""
    sides = [_messages(field_of(row, side, where), ROLE, where, side) for side in ("chosen", "rejected")]
    if row.get("prompt") is not None:
        prompt = _messages(row["prompt"], "user", where, "prompt")
    else:
        shared = 0
        while shared < min(map(len, sides)) and sides[0][shared] == sides[1][shared]:
            shared += 1
        prompt, sides = sides[0][:shared], [side[shared:] for side in sides]
    if sides[0] == sides[1]:
        raise UserError(f"data.path: the answers of {where} are equal.", "A pair of one answer has nothing to learn.")
    if not prompt or not all(sides):
        lacks = "prompt" if not prompt else "answer"
        raise UserError(f"data.path: {where} has no {lacks}.", "A pair is a prompt, and two answers to it that differ.")
    return Pair(prompt, *sides)


def _messages(value: Any, role: str, where: str, field: str) -> Messages:
    """A text is one message of that role. Raises UserError for an empty one."""
    found = [{"role": role, "content": value}] if isinstance(value, str) else messages_of(value, f"data.path: {where}")
    if not all(message["content"].strip() for message in found):
        raise UserError(f"data.path: {field} of {where} is empty.", "A pair is a prompt, and two answers to it.")
    return found
