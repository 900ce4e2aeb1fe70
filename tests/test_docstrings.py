"""Docstrings of public functions mention the errors that the functions raise."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent.parent / "packages"
SOURCES = ("core/src/gangline", "ckpt-zarr/src/gangline_ckpt_zarr")
Body = ast.FunctionDef | ast.ClassDef


def raises(function: ast.FunctionDef) -> bool:
    """Return whether a function itself raises an error. A bare `raise` and nested functions do not count."""
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Raise) and node.exc is not None:
            return True
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            left += ast.iter_child_nodes(node)
    return False


def silent(node: ast.Module | ast.ClassDef, path: str = "") -> Iterator[str]:
    """Yield the public functions and methods whose docstring omits the errors that they raise.

    The docstring of a class counts for its `__init__` and `__post_init__`.
    """
    for each in node.body:
        if isinstance(each, ast.ClassDef) and not each.name.startswith("_"):
            yield from silent(each, f"{each.name}.")
        elif isinstance(each, ast.FunctionDef) and raises(each):
            makes = each.name in ("__init__", "__post_init__")
            said = (ast.get_docstring(node if makes else each) or "").lower()
            if (makes or not each.name.startswith("_")) and "raise" not in said and "refuse" not in said:
                yield path + each.name


@pytest.mark.parametrize("source", SOURCES)
def test_docstrings_mention_raised_errors(source: str) -> None:
    root = PACKAGES / source
    files = [path for path in root.rglob("*.py") if root / "examples" not in path.parents]
    found = {str(path.relative_to(root)): list(silent(ast.parse(path.read_text()))) for path in sorted(files)}
    assert {file: names for file, names in found.items() if names} == {}


def test_docstring_without_raised_error_is_reported() -> None:
    code = '''
class A:
    """A."""
    def __init__(self): raise ValueError
    def told(self):
        """Raises ValueError."""
        raise ValueError
    def silent(self):
        """Does it."""
        if self: raise ValueError
    def passes_on(self):
        try: pass
        except ValueError: raise
'''
    assert list(silent(ast.parse(code))) == ["A.__init__", "A.silent"]
