"""Import cycles: none through annotations (TYPE_CHECKING) and none through imports inside functions."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir() if (path / "src").is_dir())


def modules(source: Path) -> dict[str, Path]:
    """Return module -> file, for all packages below `source`."""
    files = {".".join(path.relative_to(source).with_suffix("").parts): path for path in source.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the imports of a module when it is loaded or type-checked, without imports inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)  # a submodule, or a name in a module
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported(node)


def imported_as_it_runs(tree: ast.AST) -> Iterator[str]:
    """Yield the imports at the top of a module and inside functions, without those for annotations alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield from imported(ast.Module([node], [])) if isinstance(node, ast.Import | ast.ImportFrom) else ()
        yield from imported_as_it_runs(node)


def circle(source: Path, names: Callable[[ast.AST], Iterator[str]] = imported) -> list[str]:
    """Return an import cycle, or []. Each module precedes one that imports it; the first is repeated at the end."""
    there = modules(source)
    needs: dict[str, set[str]] = {}
    for name, path in there.items():
        found = {each if each in there else each.rpartition(".")[0] for each in names(ast.parse(path.read_text()))}
        needs[name] = (found & there.keys()) - {name}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_have_no_import_cycle(package: str) -> None:
    assert circle(ROOT / "packages" / package / "src") == []


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_in_functions_have_no_cycle(package: str) -> None:
    assert circle(ROOT / "packages" / package / "src", imported_as_it_runs) == []


def test_import_cycle_through_annotation_is_reported(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").write_text("")
    (tmp_path / "p" / "a.py").write_text("from p import b\n")
    (tmp_path / "p" / "b.py").write_text("def f():\n    import p.a\n")
    assert circle(tmp_path) == []
    assert set(circle(tmp_path, imported_as_it_runs)) == {"p.a", "p.b"}
    (tmp_path / "p" / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import X\n")
    assert set(circle(tmp_path)) == {"p.a", "p.b"}
