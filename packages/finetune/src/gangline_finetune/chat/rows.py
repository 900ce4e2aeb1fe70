"""Rows of JSON lines and Parquet files, and their required fields. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from gangline import UserError
from gangline_basics.data.chat_rows import drop_nulls
from gangline_basics.data.compressed import open_decompressed
from gangline_basics.data.corpus import list_corpus

Row = tuple[str, dict[str, Any]]  # (location "line N of FILE", fields)
LINES, COLUMNS = (".jsonl", ".ndjson", ".json"), ".parquet"
KINDS = "Supported are .jsonl, .ndjson and .json files, also compressed, and .parquet files."


def read_rows(path: str | list[str] | None) -> Iterator[Row]:
    """Yield (location "line N of FILE", row) of all files that `path` names, in order.

    Raises UserError for a missing, unsupported or damaged file.
    """
    if path is None:
        fix = "Set it to the data files (JSONL or Parquet)."
        raise UserError("data.path is not set.", fix, "data.path=chats.jsonl")
    for file in list_corpus(path, fix=KINDS):
        name = file.path.lower()
        if name.endswith(COLUMNS):
            yield from _read_parquet(file.path)
        elif any(ending in name for ending in LINES):
            yield from _read_lines(file.path)
        else:
            raise UserError(f"data.path: the format of {file.path} is not supported.", KINDS)


def _read_lines(path: str) -> Iterator[Row]:
    with open_decompressed(path, prefix="data.path: ") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"line {number} of {path}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"data.path: {where} is not JSON.", str(error)) from error
            if not isinstance(row, dict):
                raise UserError(
                    f"data.path: {where} must be a JSON object.", "A .jsonl file has one JSON object per line."
                )
            yield where, row


def _read_parquet(path: str) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        why = "pip install 'gangline-finetune[parquet]'"
        raise UserError(f"data.path: reading {path} requires pyarrow, which is not installed.", "", why) from error
    try:
        for number, row in enumerate(parquet.read_table(path).to_pylist(), 1):
            yield f"row {number} of {path}", drop_nulls(row)
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.path: {path} cannot be read.", str(error)) from error


def get_field(row: dict[str, Any], field: str, where: str) -> Any:
    """Return a field of a row. Raises UserError, which lists the row's fields, if the field is missing or null."""
    if row.get(field) is None:
        lists = [name for name, value in row.items() if isinstance(value, list)]
        raise UserError(
            f"data.path: the field {field!r} of {where} is missing or null.",
            f"Fields of the row: {', '.join(row) or 'none'}.",
            f"data.field={lists[0]}" if lists and field == "messages" else "",
        )
    return row[field]


def says(message: dict[str, Any]) -> bool:
    """Return whether a message has content: text, tool calls or other fields that a template may render."""
    return any(value for key, value in message.items() if key not in ("role", "name", "content", "weight")) or bool(
        message["content"].strip()
    )


def select_split(every: Sequence[Row], fraction: float, split: str) -> list[Row]:
    """Return the rows of a split. The share `fraction` of rows, at least one unless 0, is held out, evenly spaced."""
    count = len(every)
    holdout_size = min(count, max(1, round(count * fraction))) if fraction else 0
    mask = [
        (number + 1) * holdout_size // max(1, count) > number * holdout_size // max(1, count) for number in range(count)
    ]
    return [row for row, is_held in zip(every, mask, strict=True) if is_held is not (split == "train")]
