"""Each package's README has a tree of its source, with a phrase where a name does not say it all; it is complete."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = sorted(path.parent for path in (Path(__file__).parent.parent / "packages").glob("*/src"))


def tree(readme: str) -> Iterator[tuple[str, str]]:
    """(path below src/IMPORT/, what is said of it) of each file and folder; several may share one line."""
    lines = iter(readme.splitlines())
    start = next(line for line in lines if re.fullmatch(r" *src/gangline\w*/", line))
    root, above = len(start) - len(start.lstrip()), [""]
    for line in lines:
        found = re.fullmatch(r"( *)((?:[\w.]+(?:\.py|/)(?: +|$))+)(.*)", line)
        if found is None or len(found[1]) <= root:
            return
        del above[(len(found[1]) - root) // 2 :]
        for entry in found[2].split():
            yield above[-1] + entry, found[3]
        above.append(above[-1] + found[2].split()[-1])


def there(source: Path) -> set[str]:
    """Files and folders of Python below a folder; the folder's own `__init__` goes without saying."""
    files = {path for path in source.rglob("*.py") if path.name != "__init__.py"}
    folders = {path.parent for path in source.rglob("*.py")} - {source}
    names = {str(path.relative_to(source)) for path in files}
    return names | {f"{path.relative_to(source)}/" for path in folders}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_readme_tree_matches_source_files(package: Path) -> None:
    (source,) = (package / "src").iterdir()
    shown = dict(tree((package / "README.md").read_text()))
    said = {path for path in shown if path.rpartition("/")[2] != "__init__.py"}
    assert said - there(source) == set(), "is shown and not there"
    assert there(source) - said == set(), "is there and not shown"


def test_readme_tree_and_source_files_are_parsed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("__init__.py", "b.py", "a/__init__.py", "a/c.py", "a/d.py"):
        (tmp_path / name).write_text("")
    text = "    src/gangline_x/\n      b.py   one\n      a/     two\n        c.py  d.py  three\n\n    then\n"
    assert dict(tree(text)) == {"b.py": "one", "a/": "two", "a/c.py": "three", "a/d.py": "three"}
    assert there(tmp_path) == {"b.py", "a/", "a/c.py", "a/d.py"}
