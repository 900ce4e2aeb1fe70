"""Documents of a file: plain text or JSON lines, optionally compressed. Torch-free."""

from __future__ import annotations

import json
import re
from typing import Any

from gangline.errors import UserError
from gangline_basics.data.compressed import COMPRESSED, find_compression, open_decompressed

HEAD = 1 << 16  # number of bytes that are enough to distinguish text from binary data
# maximum fractions of NUL bytes and of invalid UTF-8 in a text: Latin-1 prose has up to 0.1 invalid UTF-8
NULS, INVALID = 1e-3, 0.3
LINES = (".jsonl", ".ndjson")
_HALF = re.compile("[\ud800-\udfff]")


def is_lines(path: str) -> bool:
    """Return whether each line of a file is a JSON object with one document."""
    return path.lower().removesuffix(find_compression(path)).endswith(LINES)


def read(path: str, limit: int = -1) -> bytes:
    """Return the uncompressed bytes of a file, at most `limit`. Raises UserError if the file cannot be read."""
    with open_decompressed(path, prefix="data.path: ") as file:
        return file.read(limit)


def check_head(path: str, field: str, binary: bool) -> None:
    """Raise UserError for a file whose beginning shows that it cannot be read as text."""
    head = read(path, HEAD)
    if is_lines(path):
        read_documents(head if len(head) < HEAD else head[: head.rfind(b"\n") + 1], path, field)
    elif not binary:
        refuse_binary(head, path)


def describe_binary(content: bytes) -> str:
    """Return count and kind of the non-text bytes at the beginning of a file, or "" if the file looks like text."""
    head = content[:HEAD]
    # the end of `head` may split a character
    nuls, invalid = head.count(0), head[:-4].decode(errors="replace").count("�")
    if nuls > NULS * len(head):
        return f"{nuls} NUL bytes"
    return f"{invalid} bytes that are not UTF-8" if invalid > INVALID * len(head) else ""


def has_half_character(text: str) -> bool:
    """Return whether a text has half of a surrogate pair, which JSON can represent and UTF-8 cannot."""
    return _HALF.search(text) is not None


def encode_utf8(text: str) -> bytes:
    """Return a text as bytes. Half of a surrogate pair becomes three bytes that are invalid UTF-8."""
    return text.encode(errors="surrogatepass")


def replace_invalid(content: bytes) -> tuple[str, int]:
    """Return bytes as text, with U+FFFD in place of invalid UTF-8, and the number of replacements."""
    text = content.decode(errors="replace")
    return text, text.count("\ufffd") - content.count("\ufffd".encode())


def refuse_binary(content: bytes, path: str) -> None:
    """Raise UserError for bytes that do not look like text."""
    if not (what := describe_binary(content)):
        return
    endings = ", ".join(COMPRESSED)
    raise UserError(
        f"data.path: {path} does not look like text.",
        f"The first {min(len(content), HEAD)} bytes of the file contain {what}.",
        f"Supported formats: plain text and {LINES[0]}, which may be compressed ({endings}).",
        "data.binary=true reads binary files.",
    )


def read_documents(content: bytes, path: str, field: str, first: int = 1) -> list[bytes]:
    """Return the string `field` of the JSON object in each line. first: number of the first line.

    Raises UserError that names the line, and the fields that the line has.
    """
    documents = []
    for number, line in enumerate(content.split(b"\n"), first):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"data.path: line {number} of {path} is not JSON.", str(error)) from error
        if not isinstance(record, dict):
            raise UserError(f"data.path: line {number} of {path} is not a JSON object.", 'Required: {"text": "..."}')
        if not isinstance(record.get(field), str):
            raise _explain_no_text(record, number, path, field)
        documents.append(encode_utf8(record[field]))  # `encoding_errors` handles the invalid UTF-8 of lone surrogates
    return documents


def _explain_no_text(record: dict[str, Any], number: int, path: str, field: str) -> UserError:
    texts = [name for name, value in record.items() if isinstance(value, str)]
    what = "is not a text" if field in record else "is missing"
    return UserError(
        f"data.path: the field {field!r} of line {number} of {path} {what}.",
        f"Fields of the line: {', '.join(record) or 'none'}.",
        f"To read another field:  {'  or  '.join(f'data.text_field={name}' for name in texts)}" if texts else "",
    )


def read_lines(content: bytes, cut: int | None, after: bool) -> tuple[bytes, int]:
    """Return the complete lines that start before byte `cut`, or after it, and the line number of the first of them."""
    if cut is None:
        return content, 1
    at = content.rfind(b"\n", 0, cut) + 1
    at = at if at == cut else (content.find(b"\n", cut) + 1 or len(content))
    if at >= len(content.rstrip()):  # the part after `cut`, for validation, always has at least the last line
        at = content.rstrip().rfind(b"\n") + 1
    return (content[at:], content.count(b"\n", 0, at) + 1) if after else (content[:at], 1)
