"""Parser that converts a row of a file to a pair of answers. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gangline import UserError
from gangline_basics.data.answers import ASSISTANT, Messages
from gangline_basics.data.chat_rows import parse_messages
from gangline_finetune.chat.rows import get_field

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Pair:
    """Prompt with a chosen and a rejected continuation."""

    prompt: Messages
    chosen: Messages
    rejected: Messages


def parse_pair(row: dict[str, Any], where: str) -> Pair:
    """Parse the pair of a row; each side is one assistant answer, or several with other messages in between.

    Raises UserError, which names the row, if prompt or answers are empty, if the sides are equal, or if a side does not
    begin and end with an answer of nonzero weight.
    """
    sides = [_make_messages(get_field(row, side, where), ASSISTANT, where, side) for side in SIDES]
    if row.get("prompt") is not None:
        prompt, sides = _strip_prompt(_make_messages(row["prompt"], "user", where, "prompt"), sides, where)
    else:
        prompt_length = 0
        while prompt_length < min(map(len, sides)) and sides[0][prompt_length] == sides[1][prompt_length]:
            prompt_length += 1
        prompt, sides = sides[0][:prompt_length], [side[prompt_length:] for side in sides]
    if sides[0] == sides[1]:
        raise UserError(f"data.path: the answers of {where} are equal.", "A pair needs two different answers.")
    if not prompt or not all(sides):
        lacks = "prompt" if not prompt else "answer"
        raise UserError(
            f"data.path: the {lacks} of {where} is missing.", "A pair needs a prompt and two different answers."
        )
    for name, side in zip(SIDES, sides, strict=True):
        if not side[0]["role"] == side[-1]["role"] == ASSISTANT:
            roles = ", ".join(message["role"] for message in side)
            raise UserError(
                f"data.path: {name} of {where} must begin and end with an answer.",
                f"Roles after the prompt: {roles}. The first and the last role must be {ASSISTANT}.",
            )
        if any(message["role"] == ASSISTANT and message.get("weight") == 0 for message in side):
            raise UserError(
                f"data.path: {name} of {where} has an answer of weight 0.",
                "DPO compares all answers of both sides.",
                "Remove the weight, or the pair.",
            )
    return Pair(prompt, *sides)


def _strip_prompt(prompt: Messages, sides: list[Messages], where: str) -> tuple[Messages, list[Messages]]:
    """Return (prompt, answers of both sides). Sides may be complete chats, also with a system message first."""
    begins = [_begin(prompt, side) for side in sides]
    whole = next((begin for begin in begins if begin), prompt)
    if any(begin is None or (begin and _list_turns(begin) != _list_turns(whole)) for begin in begins):
        raise UserError(
            f"data.path: chosen and rejected of {where} do not match the prompt of the row.",
            "Each must be an answer to the prompt, or a complete chat that begins with the prompt.",
        )
    return whole, [side[len(begin or ()) :] for side, begin in zip(sides, begins, strict=True)]


def _begin(prompt: Messages, side: Messages) -> Messages | None:
    """Return `side` up to the end of `prompt`; [] if `side` has only answers; None for another prompt."""
    for before in (0, 1):
        end = before + len(prompt)
        if _list_turns(side[before:end]) == _list_turns(prompt) and all(
            one["role"] == "system" for one in side[:before]
        ):
            return side[:end]
    return [] if side[0]["role"] == ASSISTANT else None


def _list_turns(messages: Messages) -> list[tuple[str, str]]:
    return [(message["role"], message["content"].strip()) for message in messages]


def _make_messages(value: Any, role: str, where: str, field: str) -> Messages:
    """Return the messages of a field; a text becomes one message of `role`. Raises UserError for an empty message."""
    messages = (
        [{"role": role, "content": value}] if isinstance(value, str) else parse_messages(value, f"data.path: {where}")
    )
    if not all(message["content"].strip() for message in messages):
        raise UserError(f"data.path: {field} of {where} is empty.", "A pair needs a prompt and two different answers.")
    return messages
