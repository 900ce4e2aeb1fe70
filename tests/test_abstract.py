"""Base classes of the packages: each is abstract or final, and is never instantiated itself.

The conformance kit is exempt.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
BASES = {"ABC", "Protocol", "TypedDict", "NamedTuple", "Exception"}
DATA = {"PartConfig", "Node"}  # options and config nodes: subclasses may only change defaults


def concrete(files: Iterable[Path]) -> dict[str, str]:
    """Return base class that is not marked as abstract -> one of its subclasses."""
    classes = {
        node.name: node
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    bases = {name: [ast.unparse(base).partition("[")[0] for base in node.bases] for name, node in classes.items()}

    def data(name: str) -> bool:
        return name in DATA or any(map(data, bases.get(name, ())))

    def abstract(name: str) -> bool:
        methods = (item for item in classes[name].body if isinstance(item, ast.FunctionDef))
        marks = [ast.unparse(mark) for method in methods for mark in method.decorator_list]
        return bool(BASES & set(bases[name])) or "abstractmethod" in marks or data(name)

    return {base: name for name in classes for base in bases[name] if base in classes and not abstract(base)}


def test_base_classes_are_abstract() -> None:
    apart = {ROOT / "packages/testkit/src/gangline_testkit"}
    found = concrete(path for path in ROOT.glob("packages/*/src/**/*.py") if apart.isdisjoint(path.parents))
    assert found == {}


def test_concrete_base_class_is_reported(tmp_path: Path) -> None:
    classes = ["A", "B(A)", "C(ABC)", "D(C)", "E(PartConfig)", "F(E)"]
    (tmp_path / "a.py").write_text("\n".join(f"class {each}: ..." for each in classes))
    assert concrete(tmp_path.glob("*.py")) == {"A": "B"}
