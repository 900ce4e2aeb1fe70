"""Readers of the documents in one input file: plain text, JSONL or Parquet, compressed or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any, BinaryIO, cast

from gangline import UserError
from gangline_basics.data.chat_rows import drop_nulls, parse_messages, parse_tools
from gangline_basics.data.compressed import open_decompressed
from gangline_basics.data.formats import describe_binary, encode_utf8, replace_invalid
from gangline_dataloader.prepare.inputs import Input

PROBE = 1 << 13  # leading bytes in which a NUL marks a file as binary


@dataclass(frozen=True)
class TextDocument:
    """One document before cleaning. `name` is its origin: a file, or a file and a row number."""

    text: str
    name: str
    messages: list[dict[str, Any]] | None = None  # messages of a conversation; None: `text` is the document
    tools: list[Any] | None = None  # tools that the conversation may call
    invalid: int = 0  # number of U+FFFD that replace invalid UTF-8; three for half of a surrogate pair
    absent: bool = False  # whether the field of the row is null


class NotText(Exception):
    """Error: a file is binary, not text."""


def read_documents(file: Input, field: str, chat: bool = False) -> Iterator[TextDocument]:
    """Yield the documents of a file, in order; an empty text is a document, too.

    chat  whether each row's field holds the messages of a conversation
    Raises NotText for a binary file, and UserError for a damaged file, a row without the field, or a missing package.
    """
    if chat and file.kind == "text":
        raise UserError(
            f"{file.path} must be JSONL or Parquet.", "--chat reads conversations from rows, one conversation per row."
        )
    source = partial(_open_remote, file.path) if "://" in file.path else None
    with open_decompressed(file.path, ending=file.compression, source=source) as stream:
        if file.kind == "parquet":
            yield from _read_parquet(file, stream, field, chat)
        elif file.kind == "jsonl":
            yield from _read_jsonl(file, stream, field, chat)
        else:
            content = stream.read()
            if b"\0" in content[:PROBE] or describe_binary(content):
                raise NotText(file.path)
            text, invalid = replace_invalid(content)
            yield TextDocument(text, file.name, invalid=invalid)


def check_first_row(files: Sequence[Input], field: str, chat: bool) -> None:
    """Raise UserError if the first row of the first file with rows is invalid; with `chat` also for a text file."""
    rows = [file for file in files if chat or file.kind != "text"]
    for file in sorted(rows, key=lambda file: file.kind != "text")[:1]:
        next(read_documents(file, field, chat), None)


def _open_remote(path: str) -> BinaryIO:
    import fsspec

    return cast(BinaryIO, fsspec.open(path, "rb").open())


def _read_jsonl(file: Input, stream: BinaryIO, field: str, chat: bool) -> Iterator[TextDocument]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file.path}, line {number}, is not JSON.", str(error)) from error
        yield _parse_document(row, field, chat, f"{file.path}, line {number},", f"{file.name}:{number}")


def _read_parquet(file: Input, stream: BinaryIO, field: str, chat: bool) -> Iterator[TextDocument]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError(f"{file.path} needs pyarrow.", "", "pip install 'gangline-dataloader[parquet]'") from error
    try:
        table = parquet.ParquetFile(stream if stream.seekable() else BytesIO(stream.read()))
    except pyarrow.ArrowException as error:
        raise UserError(f"{file.path} is not a valid Parquet file.", str(error)) from error
    names = table.schema_arrow.names
    if field not in names:
        raise _explain_missing_field(f"{file.path}", field, names)
    columns = [field, "tools"] if chat and "tools" in names and field != "tools" else [field]
    if twice := [name for name in columns if names.count(name) > 1]:
        raise UserError(f"{file.path} has more than one column {twice[0]!r}.", "Rename or remove one of the columns.")
    number = 0
    try:
        for batch in table.iter_batches(columns=columns):
            for row in _decode_rows(batch, f"{file.path}, row {{}},", number):
                number += 1
                where, name = f"{file.path}, row {number},", f"{file.name}:{number}"
                yield _parse_document(drop_nulls(row) if chat else row, field, chat, where, name)
    except pyarrow.ArrowException as error:
        raise UserError(f"{file.path} is damaged after row {number}.", str(error)) from error


def _decode_rows(batch: Any, where: str, before: int) -> list[Any]:
    """Decode the rows of a batch, preceded by `before` rows. Raises UserError for a row that is not UTF-8."""
    try:
        return cast(list[Any], batch.to_pylist())
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            raise UserError(f"{where.format(before + 1)} is not UTF-8.", str(error)) from error
        half = batch.num_rows // 2
        return [
            *_decode_rows(batch.slice(0, half), where, before),
            *_decode_rows(batch.slice(half), where, before + half),
        ]


def _parse_document(row: object, field: str, chat: bool, where: str, name: str) -> TextDocument:
    if not chat:
        text = _get_text(row, field, where)
        whole, invalid = replace_invalid(encode_utf8(text or ""))
        return TextDocument(whole, name, invalid=invalid, absent=text is None)
    if not isinstance(row, dict) or field not in row:
        raise _explain_missing_field(where, field, list(row) if isinstance(row, dict) else [])
    return TextDocument("", name, parse_messages(row[field], where), parse_tools(row, where))


def _get_text(row: object, field: str, where: str) -> str | None:
    if not isinstance(row, dict):
        raise UserError(f"{where} must be a JSON object with fields.")
    if field not in row:
        raise _explain_missing_field(where, field, list(row))
    if row[field] is None:
        return None
    if not isinstance(row[field], str):
        raise UserError(f"{where} must hold text in its field {field!r}, and holds {row[field]!r:.60}.")
    return cast(str, row[field])


def _explain_missing_field(where: str, field: str, known: list[str]) -> UserError:
    names = ", ".join(map(str, known)) or "none"
    return UserError(f"{where} has no field {field!r}.", f"Fields: {names}.", "--field NAME")
