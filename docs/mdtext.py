"""Format small pieces of Markdown for the generated pages."""

from __future__ import annotations

import re

_COLUMNS = re.compile(r"(\S+) {2,}(?=\S)")  # name of an entry in a paragraph with aligned columns


def prose(text: str) -> str:
    """Return the text of a docstring as one paragraph."""
    return " ".join(text.split()).replace("``", "`")


def paragraphs(text: str) -> str:
    """Return a docstring as Markdown; a paragraph with aligned columns becomes a text block."""
    return "\n\n".join(f"```text\n{part}\n```" if _has_columns(part) else prose(part) for part in text.split("\n\n"))


def cell(text: object) -> str:
    """Return a text escaped for a table cell. A code span shows `<` as it is."""
    pieces = re.split(r"(`[^`]*`)", prose(str(text)).replace("|", "\\|"))
    return "".join(piece if piece.startswith("`") else piece.replace("<", "&lt;") for piece in pieces)


def docstring_cell(text: str) -> str:
    """Return a docstring escaped for a table cell; a paragraph with aligned columns becomes one line per entry."""
    shown = ""
    for part in text.split("\n\n"):
        if _has_columns(part):
            entries = [_COLUMNS.sub(r"`\1`: ", entry, count=1) for entry in re.split(r"\n(?! )", part)]
            shown += "".join(f"<br>{cell(entry)}" for entry in entries) + "<br>"
        else:
            shown += f"{'' if shown.endswith('<br>') else ' '}{cell(part)}"
    return shown.strip().removesuffix("<br>")


def _has_columns(part: str) -> bool:
    return any(_COLUMNS.match(line) for line in part.splitlines())


def code_cell(text: str) -> str:
    """Return code escaped for a table cell."""
    return "`" + text.replace("|", "\\|") + "`"


def anchor(heading: str) -> str:
    """Return the anchor that GitHub generates for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def sentence(text: str) -> str:
    """Return a summary with a capital letter and a full stop. A first word that contains a dot is unchanged."""
    first = text.split()[0]
    return (text if "." in first else text[0].upper() + text[1:]).rstrip(".") + "."
