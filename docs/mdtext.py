"""Small pieces of Markdown that the generated pages are made of."""

from __future__ import annotations

import re


def prose(text: str) -> str:
    """A docstring's text as one paragraph."""
    return " ".join(text.split()).replace("``", "`")


def paragraphs(text: str) -> str:
    """A docstring as Markdown: a paragraph whose lines are set in columns stays as it is set."""
    found = []
    for part in text.split("\n\n"):
        columns = any(re.match(r"\S+ {2,}\S", line) for line in part.splitlines())
        found.append(f"```text\n{part}\n```" if columns else prose(part))
    return "\n\n".join(found)


def cell(text: object) -> str:
    """Text as it may stand in a cell of a table."""
    return prose(str(text)).replace("|", "\\|").replace("<", "&lt;")


def code_cell(text: str) -> str:
    """Code in a cell of a table."""
    return "`" + text.replace("|", "\\|") + "`"


def anchor(heading: str) -> str:
    """What GitHub makes of a heading, to link to it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def sentence(text: str) -> str:
    """A summary with a capital and a full stop; a name with a dot in it keeps its letters."""
    first = text.split()[0]
    return (text if "." in first else text[0].upper() + text[1:]).rstrip(".") + "."
