"""What of core is v1 for plugins: a facade for each kind of author, and nothing else is imported by plugins.

A facade offers names of others and loads each when it is asked for, so that none pulls torch before it is needed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "packages/core/src/gangline"
LAZY = (
    "callback", "checkpoint", "cluster", "comm", "config", "data", "explain", "launch", "model", "optimizer",
    "precision", "pulse", "strategy", "tools", "track",
)  # fmt: skip
MODULES = (
    "api",
    "figure",
    "forward_context",
    "health",
    "plugin.registry",
    "reliability",
    "testing",
)  # which are for plugins as they stand
FACADES = {"gangline", *(f"gangline.{name}" for name in (*LAZY, *MODULES))}


def texts(place: str) -> Iterator[str]:
    """The Python that authors of plugins wrote, or copy from us."""
    if place == "docs":
        for page in (ROOT / "docs").rglob("*.md"):
            yield from re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        return
    folder = {"examples": CORE / "examples", "templates": ROOT / "templates"}.get(
        place, ROOT / "packages" / place / "src"
    )
    yield from (path.read_text() for path in sorted(folder.rglob("*.py")))


def past_facades(text: str) -> set[str]:
    """Modules of core that a text imports from, and that are no facade."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "gangline":
            found |= {f"gangline.{alias.name}" for alias in node.names if (CORE / f"{alias.name}.py").exists()}
            found |= {f"gangline.{alias.name}" for alias in node.names if (CORE / alias.name).is_dir()}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module))
    return {name for name in found if name.partition(".")[0] == "gangline"} - FACADES


PLACES = ["docs", "examples", "templates", *(p.name for p in (ROOT / "packages").iterdir() if p.name != "core")]


@pytest.mark.parametrize("place", sorted(PLACES))
def test_plugins_import_facades_alone(place: str) -> None:
    assert not set().union(*map(past_facades, texts(place)))


@pytest.mark.parametrize("name", LAZY)
def test_every_name_of_a_facade_is_there(name: str) -> None:
    facade = import_module(f"gangline.{name}")
    assert facade.__doc__
    for each in facade.__all__:
        assert getattr(facade, each) is not None
    with pytest.raises(AttributeError, match="nowhere"):
        facade.nowhere  # noqa: B018


@pytest.mark.parametrize("name", LAZY)
def test_type_checkers_see_the_same_names(name: str) -> None:
    facade = import_module(f"gangline.{name}")
    (block,) = (node for node in ast.parse(Path(str(facade.__file__)).read_text()).body if isinstance(node, ast.If))
    seen: dict[str, object] = {}
    exec("\n".join(ast.unparse(node) for node in block.body), seen)
    del seen["__builtins__"]
    assert seen == {each: getattr(facade, each) for each in facade.__all__}


def test_what_a_strategy_may_import_is_what_strategies_do_import() -> None:
    """v1 is a promise, so it holds no name for which nobody has had a use."""
    used = {
        alias.name
        for place in PLACES
        for text in texts(place)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module == "gangline.strategy"
        for alias in node.names
    }
    assert set(import_module("gangline.strategy").__all__) == used


def test_facades_load_no_torch() -> None:
    of_running_modules = "gangline.forward_context"
    names = ", ".join(sorted(FACADES - {of_running_modules, "gangline.testing"}))
    subprocess.run([sys.executable, "-c", f"import sys, {names}; assert 'torch' not in sys.modules"], check=True)


def test_what_goes_past_a_facade_is_found() -> None:
    assert past_facades("import gangline.config\nfrom gangline.model import Node\nfrom gangline import Part") == set()
    assert past_facades("from gangline.model.tree import Node") == {"gangline.model.tree"}
    past = past_facades("import gangline.run.directory\nfrom gangline import record")
    assert past == {"gangline.run.directory", "gangline.record"}
