"""One word for one thing: no public class name twice in the packages, the conformance kit apart."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def twice(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Public class names that more than one place defines, and the files that do."""
    found = defaultdict(list)
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_no_public_class_name_twice() -> None:
    kit = ROOT / "packages/core/src/gangline/testing"
    files = [path for path in sorted(ROOT.glob("packages/*/src/**/*.py")) if kit not in path.parents]
    assert twice(files) == {}


def test_a_name_that_two_files_define_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Run: ...\nclass _Own: ...\n")
    (tmp_path / "b.py").write_text("if True:\n    class Run: ...\nclass _Own: ...\n")
    assert list(twice(tmp_path.glob("*.py"))) == ["Run"]
