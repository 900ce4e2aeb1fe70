"""The tables in docs/how-to/fake-gpu.md: the host waits of each layout, and the kernels of a block."""

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


def read_table(name: str) -> list[str]:
    """Return the lines of a table of the page."""
    return PAGE.read_text().split(f"<!-- begin: {name} -->\n")[1].split(f"<!-- end: {name} -->")[0].splitlines()


def write_table(name: str, lines: Iterable[str]) -> None:
    """Replace a table of the page."""
    begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
    before, rest = PAGE.read_text().split(begin)
    PAGE.write_text(before + begin + "".join(f"{line}\n" for line in lines) + end + rest.split(end)[1])


def read_waits() -> dict[str, str]:
    """Return layout -> its waits, as the page states them, in the order of the page."""
    rows = (re.fullmatch(r"\| ([^|]+?) \| (.+) \|", line) for line in read_table("waits")[2:])
    return {row[1]: row[2] for row in rows if row}


def write_waits(layouts: Iterable[Layout]) -> None:
    """Measure each layout and write the table."""
    rows = [f"| {layout.name} | {describe_waits(measure(layout).waits)} |" for layout in layouts]
    write_table("waits", ["| layout | waits in a step |", "|---|---|", *rows])


def describe_waits(waits: Counter[str]) -> str:
    """Return the waits of a step as text, without the one for the step record, which every layout has."""
    record = [place for place in waits if RECORD.fullmatch(place)]
    assert [waits[place] for place in record] == [1]
    others = sorted((waits - Counter(record)).items())
    return "; ".join(f"{number} × {place.replace(' at ', ' at `', 1)}`" for place, number in others) or "none"
