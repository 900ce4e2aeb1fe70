"""Unique public class names across the packages, and a maximum length of files.

The conformance kit is exempt from the rule about names.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = sorted(ROOT.glob("packages/*/src/**/*.py"))
MOST_LINES = 400  # maximum of a file; most files have fewer than 150


def twice(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Return public class name -> files that define it, for names with several files."""
    found = defaultdict(list)
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_public_class_names_are_unique() -> None:
    kit = ROOT / "packages/testkit"
    assert twice(path for path in SOURCE if kit not in path.parents) == {}


def test_duplicate_class_name_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Run: ...\nclass _Own: ...\n")
    (tmp_path / "b.py").write_text("if True:\n    class Run: ...\nclass _Own: ...\n")
    assert list(twice(tmp_path.glob("*.py"))) == ["Run"]


def long(files: Iterable[Path]) -> dict[str, int]:
    """Return file -> number of its lines, for files above the maximum."""
    lines = {str(path): len(path.read_text().splitlines()) for path in files}
    return {path: count for path, count in lines.items() if count > MOST_LINES}


def test_files_are_below_line_limit() -> None:
    assert long(SOURCE) == {}


def test_long_file_is_reported(tmp_path: Path) -> None:
    for name, count in (("a.py", MOST_LINES), ("b.py", MOST_LINES + 1)):
        (tmp_path / name).write_text("x = 1\n" * count)
    assert long(tmp_path.glob("*.py")) == {str(tmp_path / "b.py"): MOST_LINES + 1}
