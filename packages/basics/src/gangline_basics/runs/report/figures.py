"""matplotlib figures as elements of a page: inline SVG with text as text, in the colours of the page."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from gangline.errors import escape_controls
from gangline_basics.figure import INK, PALE, render
from gangline_basics.runs.report.markup import make

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 4.4  # width of a figure in inches, readable at the width of a phone
COLOURS = {INK: "var(--ink)", PALE: "var(--rule)", "#ffffff": "var(--paper)"}
_NUMBER = re.compile(r"-?\d+\.\d{2,}")
_REFERENCE = re.compile(r"#([\w-]+)(\)?)")


def render_svg(figure: Figure, caption: str) -> Element:
    """Return a figure with its caption, which is also the text alternative."""
    content = render(figure, ".svg")
    mark = blake2b(content, digest_size=4).hexdigest()  # ids of different figures must differ
    svg = ElementTree.fromstring(content)
    used = {match[1] for part in svg.iter() for value in part.attrib.values() for match in _REFERENCE.finditer(value)}
    for parent in list(svg.iter()):
        for child in [child for child in parent if child.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)
        parent.tag = parent.tag.rpartition("}")[2]
        parent.attrib = {
            name.rpartition("}")[2]: _shorten(name, value, mark)
            for name, value in parent.attrib.items()
            if name != "id" or value in used
        }
        for text in ("text", "tail"):
            if not (getattr(parent, text) or "").strip():
                setattr(parent, text, None)
    for name in ("width", "height", "version"):
        svg.attrib.pop(name, None)
    svg.attrib |= {"role": "img", "aria-label": escape_controls(f"{figure.get_suptitle()}: {caption}")}
    return make("figure", svg, make("figcaption", caption))


def _shorten(name: str, value: str, mark: str) -> str:
    """Return an attribute with the colours of the page, unique ids, and numbers to a tenth of a point."""
    if name == "id":
        return f"{mark}-{value}"
    if name.endswith("href") or "url(#" in value:
        value = _REFERENCE.sub(rf"#{mark}-\1\2", value)
    for colour, variable in COLOURS.items():
        value = value.replace(colour, variable)
    value = _NUMBER.sub(lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), value)
    return " ".join(value.split())
