"""Whether a picture can be read: for the tests of whoever draws with `gangline.figure`."""

from __future__ import annotations

from itertools import combinations
from xml.etree import ElementTree

from gangline.figure import INK, span

SVG = "{http://www.w3.org/2000/svg}"
Box = tuple[float, float, float, float]  # left, top, right, bottom


def readable(picture: str) -> list[str]:
    """The words of an SVG that `Figure` wrote, in their order: the title's first.

    Raises AssertionError where anything is outside of the picture, where words touch each other, for small or pale
    letters, and where the first words are no title.
    """
    root = ElementTree.fromstring(picture)
    left, top, wide, high = map(float, root.attrib["viewBox"].split())
    assert (left, top) == (0, 0)
    words = list(root.iter(f"{SVG}text"))
    boxes = {element: _of_text(element) for element in words}
    for element, box in [*boxes.items(), *((rect, _of_rect(rect)) for rect in root.iter(f"{SVG}rect"))]:
        assert box[0] >= -0.01, f"{_name(element)} begins left of the picture"
        assert box[1] >= -0.01, f"{_name(element)} begins above the picture"
        assert box[2] <= wide + 0.01, f"{_name(element)} ends at {box[2]:.0f}, the picture at {wide:.0f}"
        assert box[3] <= high + 0.01, f"{_name(element)} ends at {box[3]:.0f}, the picture at {high:.0f}"
    for one, other in combinations(words, 2):
        assert not _touch(boxes[one], boxes[other]), f"{one.text!r} and {other.text!r} touch"
    assert words, "a picture has words"
    assert words[0].attrib.get("font-weight") == "bold", "a picture has a title"
    assert root.findtext(f"{SVG}title", "").startswith(words[0].text or "")
    assert root.attrib["fill"] == INK, "letters are dark"
    assert not any("fill" in element.attrib for element in words), "letters are dark"
    for element in words:
        assert float(element.attrib["font-size"]) >= 11, f"{element.text!r} is small"
    return [element.text or "" for element in words]


def _of_rect(rect: ElementTree.Element) -> Box:
    left, top, wide, high = (float(rect.get(name, "0")) for name in ("x", "y", "width", "height"))
    return left, top, left + wide, top + high


def _of_text(text: ElementTree.Element) -> Box:
    """Of letters, without what hangs below the base line."""
    x, y, size = (float(text.attrib[name]) for name in ("x", "y", "font-size"))
    wide = span(text.text or "", size, text.get("font-weight") == "bold")
    before = wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[text.attrib["text-anchor"]]
    if "rotate" in text.get("transform", ""):
        return x - 0.75 * size, y - wide + before, x, y + before
    return x - before, y - 0.75 * size, x - before + wide, y


def _touch(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _name(element: ElementTree.Element) -> str:
    return repr(element.text or element.findtext(f"{SVG}title") or element.attrib)
