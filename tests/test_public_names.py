"""Public names of core: without a leading underscore, imported from the module that defines them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "packages/core/src"
SHORT = {"gangline", "gangline.config"}  # these modules re-export names of other modules


def texts(place: str) -> Iterator[str]:
    """Yield the Python code of a package, of the templates, or of the examples in the documentation."""
    if place == "docs":
        for page in (ROOT / "docs").rglob("*.md"):
            yield from re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        return
    folder = ROOT / "templates" if place == "templates" else ROOT / "packages" / place / "src"
    yield from (path.read_text() for path in sorted(folder.rglob("*.py")))


def file_of(module: str) -> Path | None:
    """Return the source file of a module of core, or None if the module does not exist."""
    path = SOURCE / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@cache
def borrowed(module: str) -> set[str]:
    """Return the names that a module of core imports from other modules."""
    file = file_of(module)
    assert file is not None, f"{module} is no module of core"
    froms = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in froms for alias in node.names}


def not_public(text: str) -> set[str]:
    """Return the wrong imports from core in a text: private names, and names that the module itself imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            imported = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in imported:
            if module.partition(".")[0] != "gangline":
                continue
            private = any(part.startswith("_") for part in [*module.split("."), name])
            if private or (name and module not in SHORT and name in borrowed(module)):
                found.add(f"{module}.{name}".rstrip("."))
    return found


PLACES = ["docs", "templates", *(p.name for p in (ROOT / "packages").iterdir() if p.name != "core")]


@pytest.mark.parametrize("place", sorted(PLACES))
def test_names_are_imported_from_where_they_are_defined(place: str) -> None:
    assert not set().union(*map(not_public, texts(place)))


def test_non_public_name_is_reported() -> None:
    assert not_public("import gangline.config\nfrom gangline.batch import Batch\nfrom gangline import Part") == set()
    assert not_public("from gangline.runtime import Batch") == {"gangline.runtime.Batch"}
    assert not_public("from gangline.plugin.parts import _NAME") == {"gangline.plugin.parts._NAME"}


# Modules that an entry module may import at its top. Every command imports all entry modules.
TORCH_FREE = (
    "api", "batch", "callback", "config", "data.base", "explain.explained", "health", "launch.base", "mesh",
    "model.tree", "optimizer", "plan", "plugin.registry", "record",
    "explain.reliability", "schedule", "shard", "track",
)  # fmt: skip


def test_entry_modules_do_not_import_torch() -> None:
    names = ", ".join(f"gangline.{name}" for name in TORCH_FREE)
    subprocess.run([sys.executable, "-c", f"import sys, {names}; assert 'torch' not in sys.modules"], check=True)
