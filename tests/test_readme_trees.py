"""The annotated tree in a package's README is complete: each module of the package is in it, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent.parent / "packages"
WITH_TREES = ("ckpt-zarr",)  # the others' say less


def tree(readme: str) -> set[str]:
    """The paths in the block that begins with `src/`: a line is folders or files, then what they are for."""
    block = re.search(r"^    src/\S+\n((?:     .*\n)+)", readme, re.MULTILINE)
    assert block is not None, "there is no tree"
    found: set[str] = set()
    above: list[str] = []
    for line in block[1].splitlines():
        names = re.match(r" +(\S+(?: {1,2}\S+\.py)*)", line)
        assert names is not None
        depth = (len(line) - len(line.lstrip()) - 6) // 2
        above = above[:depth]
        for name in names[1].split():
            if name.endswith("/"):
                above.append(name)
            elif name.endswith(".py"):
                found.add("".join(above) + name)
    return found


@pytest.mark.parametrize("package", WITH_TREES)
def test_the_tree_names_every_module(package: str) -> None:
    (source,) = (PACKAGES / package / "src").glob("gangline*")
    there = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    inner = {path for path in there if path.endswith("/__init__.py")}  # a folder's line says what is in it
    assert tree((PACKAGES / package / "README.md").read_text()) == there - inner


def test_a_module_that_is_missing_is_found() -> None:
    assert tree("    src/p/\n      a.py  b.py   two\n      c/       a room\n        d.py   one\n\nx\n") == {
        "a.py",
        "b.py",
        "c/d.py",
    }
