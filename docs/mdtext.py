"""Format small pieces of Markdown for the generated pages."""

from __future__ import annotations

import re


def prose(text: str) -> str:
    """Return the text of a docstring as one paragraph."""
    return " ".join(text.split()).replace("``", "`")


def paragraphs(text: str) -> str:
    """Return a docstring as Markdown; a paragraph with aligned columns becomes a text block."""
    found = []
    for part in text.split("\n\n"):
        columns = any(re.match(r"\S+ {2,}\S", line) for line in part.splitlines())
        found.append(f"```text\n{part}\n```" if columns else prose(part))
    return "\n\n".join(found)


def cell(text: object) -> str:
    """Return a text escaped for a table cell."""
    return prose(str(text)).replace("|", "\\|").replace("<", "&lt;")


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
