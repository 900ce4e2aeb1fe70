"""docs/how-to/fake-gpu.md lists every layout, and its example runs. test_layouts.py compares the waits that it states.

To update the page: `GANGLINE_UPDATE=1 nox -s fake_cuda`.
"""

from __future__ import annotations

import re
from typing import Any

from page import PAGE, UPDATES, read_waits, write_waits
from test_layouts import LAYOUTS


def test_the_page_lists_each_layout() -> None:
    if UPDATES:
        write_waits(LAYOUTS)
    assert list(read_waits()) == [layout.name for layout in LAYOUTS]


def test_the_example_of_the_page_runs() -> None:
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert example
    names: dict[str, Any] = {}
    exec(example[1], names)
    names["test_my_layer_does_not_wait_for_the_gpu"]()
