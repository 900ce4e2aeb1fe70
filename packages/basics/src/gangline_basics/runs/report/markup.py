"""HTML elements of a page. ElementTree escapes all text and attributes when the page is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, tostring

from gangline.errors import escape_controls

Child = Element | str | None  # None: nothing


def make(tag: str, *children: Child, **attributes: str) -> Element:
    """Return an element with text and elements in it. `class_` is the attribute class, `aria_label` aria-label."""
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    parent = Element(tag, {names[name]: escape_controls(value) for name, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            parent.append(child)
        elif child and len(parent):
            parent[-1].tail = (parent[-1].tail or "") + escape_controls(child)
        elif child:
            parent.text = (parent.text or "") + escape_controls(child)
    return parent


def make_section(title: str, *children: Child) -> Element:
    """Return a section with a heading, which the table of contents links to."""
    return make("section", make("h2", title), *children, id=title.lower().replace(" ", "-"))


def make_table(head: Sequence[str], rows: Iterable[Sequence[Child]], numbers: Iterable[int] = ()) -> Element:
    """Return a table that scrolls by itself if it is too wide. numbers: columns to align to the right."""
    sides = {column: {"class_": "number"} for column in numbers}
    heads = [make("th", cell, scope="col", **sides.get(column, {})) for column, cell in enumerate(head)]
    body = [make("tr", *(make("td", cell, **sides.get(n, {})) for n, cell in enumerate(row))) for row in rows]
    table = make("table", make("thead", make("tr", *heads)), make("tbody", *body))
    return make("div", table, class_="scroll", tabindex="0", role="region", aria_label=head[0])


def make_facts(facts: Iterable[tuple[str, Child]]) -> Element:
    """Return a list of names with values."""
    return make("dl", *(make("div", make("dt", name), make("dd", value)) for name, value in facts))


def make_details(summary: str, *children: Child, opened: bool = False) -> Element:
    """Return a block that the reader can open and close."""
    return make("details", make("summary", summary), *children, **({"open": "open"} if opened else {}))


def make_note(text: str) -> Element:
    """Return a paragraph about data that is missing or shortened."""
    return make("p", text, class_="note")


def write_html(root: Element) -> bytes:
    """Return the content of an HTML file."""
    return b"<!DOCTYPE html>\n" + tostring(root, "unicode", method="html").encode("utf-8", "replace") + b"\n"
