"""Failure tables of the documentation: each row refers to tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEAST = {"numerical-failures": 12, "failures": 29, "elastic": 14}  # minimum number of rows on each page


def rows(name: str) -> list[list[str]]:
    """Return the cells of each row of the tables under "Failures and recovery"."""
    page = (ROOT / f"docs/how-to/{name}.md").read_text()
    section = page.partition("\n## Failures and recovery\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ") and not line.endswith(" | test |")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize("name", LEAST)
def test_each_row_names_existing_tests(name: str) -> None:
    assert len(rows(name)) >= LEAST[name]
    for when, *_, held in rows(name):
        names = re.findall(r"`([^`]+)`", held)
        assert names, f"{when}: no test holds it"
        for name in names:
            path, _, test = name.partition("::")
            tree = ast.parse((ROOT / path).read_text())
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
