"""The table in docs/how-to/fake-gpu.md of the host waits of each layout."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from layouts import Layout, measure

PAGE = Path(__file__).parent.parent / "docs/how-to/fake-gpu.md"
UPDATES = bool(os.environ.get("GANGLINE_UPDATE"))  # whether the tests write the table instead of comparing it
RECORD = re.compile(r"device to host, blocking at .*metrics\.py:_to_host")  # of the step record
TABLE = re.compile(r"(?<=<!-- begin: waits -->\n).*?(?=<!-- end: waits -->)", re.DOTALL)


def read_waits() -> dict[str, str]:
    """Return layout -> its waits, as the page states them, in the order of the page."""
    table = TABLE.search(PAGE.read_text())
    assert table
    return dict(re.findall(r"^\| ([^|]+?) \| (.+) \|$", table[0], re.MULTILINE)[1:])


def write_waits(layouts: Iterable[Layout]) -> None:
    """Measure each layout and write the table."""
    rows = [f"| {layout.name} | {describe_waits(measure(layout).waits)} |" for layout in layouts]
    table = "\n".join(["| layout | waits in a step |", "|---|---|", *rows, ""])
    PAGE.write_text(TABLE.sub(lambda found: table, PAGE.read_text()))


def describe_waits(waits: Counter[str]) -> str:
    """Return the waits of a step as text, without the one for the step record, which every layout has."""
    record = [place for place in waits if RECORD.fullmatch(place)]
    assert [waits[place] for place in record] == [1]
    others = sorted((waits - Counter(record)).items())
    return "; ".join(f"{number} × {place.replace(' at ', ' at `', 1)}`" for place, number in others) or "none"
