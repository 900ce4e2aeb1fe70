"""docs/how-to/fake-gpu.md states the host waits of each layout, and its example runs.

To update the page: `GANGLINE_UPDATE=1 nox -s fake_cuda`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from layouts import measure
from test_layouts import LAYOUTS

PAGE = Path(__file__).parent.parent / "docs/how-to/fake-gpu.md"
RECORD = re.compile(r"device to host, blocking at .*metrics\.py:_to_host")  # of the step record


def test_the_page_states_the_waits_of_each_layout() -> None:
    rows = ["| layout | waits in a step |", "|---|---|"]
    rows += [f"| {layout.name} | {describe_waits(measure(layout).waits)} |" for layout in LAYOUTS]
    check_part("waits", "\n".join(rows))


def describe_waits(waits: Counter[str]) -> str:
    """Return the waits of a step as text, without the one for the step record, which every layout has."""
    record = [place for place in waits if RECORD.fullmatch(place)]
    assert [waits[place] for place in record] == [1]
    others = sorted((waits - Counter(record)).items())
    return "; ".join(f"{number} × {place.replace(' at ', ' at `', 1)}`" for place, number in others) or "none"


def check_part(name: str, text: str) -> None:
    """Compare a generated part of the page, or write it."""
    begin, end = f"<!-- begin: {name} -->\n", f"\n<!-- end: {name} -->"
    page = PAGE.read_text()
    before, rest = page.split(begin)
    stated, after = rest.split(end.lstrip("\n"), 1)
    if os.environ.get("GANGLINE_UPDATE"):
        PAGE.write_text(f"{before}{begin}{text}{end}{after}")
    else:
        assert stated.rstrip("\n") == text


def test_the_example_of_the_page_runs() -> None:
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert example
    names: dict[str, Any] = {}
    exec(example[1], names)
    names["test_my_layer_does_not_wait_for_the_gpu"]()
