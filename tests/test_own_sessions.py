"""Tests of each package need only core, the package and the dependencies that they declare.

Here all packages are installed, as on a developer's machine. A test that chooses a part of another package passes
here, and fails in the session of its own package.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gangline.plugin.discovery import normalise_name
from gangline.plugin.registry import installed

ROOT = Path(__file__).parent.parent
PACKAGES = {path.parent.name: tomllib.loads(path.read_text()) for path in ROOT.glob("packages/*/pyproject.toml")}
WORD = re.compile(r"([a-z_/]+)=(\[[\w,.-]+\]|[\w.-]+)")


def by_day(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below a node, except those marked as nightly: nightly tests have all packages installed."""
    for child in ast.iter_child_nodes(node):
        marks = [*getattr(child, "decorator_list", [])]
        if isinstance(child, ast.Call):  # pytest.param(..., marks=pytest.mark.nightly)
            marks = [keyword.value for keyword in child.keywords if keyword.arg == "marks"]
        if not any(ast.unparse(mark).lower().endswith("nightly") for mark in marks):
            yield child
            yield from by_day(child)


def choices(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line, group, name) of each part in a file: in an override, or in `build_default_run(parallel="ddp")`."""
    tree = ast.parse(path.read_text())
    if any(
        isinstance(node, ast.Assign) and re.match(r"pytestmark = .*nightly", ast.unparse(node)) for node in tree.body
    ):
        return
    for node in by_day(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for group, names in (found.groups() for found in map(WORD.fullmatch, node.value.split()) if found):
                yield from ((node.lineno, group, name) for name in names.strip("[]").split(","))
        elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant) and node.arg:
            yield node.value.lineno, node.arg, str(node.value.value)


def list_other_parts(path: Path, *ours: str) -> list[str]:
    """Return the parts that a file chooses and that none of the distributions `ours` supplies."""
    chosen = ((line, group, name, installed().get_offers(group).get(name)) for line, group, name in choices(path))
    return [
        f"{path.name}:{line}: {group}={name} is supplied by {offer.distribution}"
        for line, group, name, offer in chosen
        if offer is not None and normalise_name(offer.distribution) not in ours
    ]


def with_needs(*wanted: str) -> set[str]:
    """Return the names of the required distributions and of all their dependencies."""
    found: set[tuple[str, str]] = set()
    left = [(Requirement(text), extra) for text in wanted for extra in ("", *Requirement(text).extras)]
    while left:
        one, extra = left.pop()
        if (key := (normalise_name(one.name), extra)) not in found:
            found.add(key)
            try:
                texts = requires(one.name) or []
            except PackageNotFoundError:  # a requirement of another system or Python version
                continue
            needs = [
                each
                for each in map(Requirement, texts)
                if each.marker is None or each.marker.evaluate({"extra": extra})
            ]
            left += [(each, of) for each in needs for of in ("", *each.extras)]
    return {name for name, _ in found}


def modules(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of the top-level package of each import statement."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, (node.module or "").partition(".")[0]


@cache
def suppliers() -> dict[str, set[str]]:
    """Return top-level module -> the distributions that contain it."""
    sources = {name: [path.name for path in (ROOT / "packages" / name / "src").glob("*")] for name in PACKAGES}
    own = {module: {PACKAGES[name]["project"]["name"]} for name in PACKAGES for module in sources[name]}
    return {name: {*map(normalise_name, found)} for name, found in packages_distributions().items()} | own


def foreign_imports(path: Path, there: set[str]) -> list[str]:
    """Return the imports of a file that none of the distributions `there` contains."""
    text = path.read_text()
    return [
        f"{path.name}:{line}: {name} is of {', '.join(sorted(suppliers()[name]))}"
        for line, name in modules(by_day(ast.parse(text)))
        if name in suppliers() and not suppliers()[name] & there and f'importorskip("{name}' not in text
    ]


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_tests_use_only_packages_of_their_session(package: str) -> None:
    name, groups = PACKAGES[package]["project"]["name"], PACKAGES[package].get("dependency-groups", {})
    there = with_needs("gangline-testkit", name, *groups.get("test", []))
    found = []
    for path in sorted((ROOT / "packages" / package / "tests").rglob("*.py")):
        found += foreign_imports(path, there)
        if "core_alone" not in path.read_text():  # the fixture core_alone hides all plugins here too
            found += list_other_parts(path, "gangline-core", "gangline-basics", normalise_name(name))
    assert found == []


FOREIGN = """
import zarr
import pytest
import sys
zarr = pytest.importorskip("gangline_moe")

@pytest.mark.parametrize("words", [("model=phi3",), pytest.param(("lora=on",), marks=pytest.mark.nightly)])
def test_one(words):
    build_default_run(parallel="3d")
    "track=[console,wandb] parallel=ddp moe=no.such precision=fp8"

@pytest.mark.nightly
def test_two():
    import transformers
    "moe=on"
"""


def test_part_and_import_of_other_package_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(FOREIGN)
    parts = [found.split()[1] for found in list_other_parts(path, "gangline-core", "gangline-basics", "gangline-track")]
    assert sorted(parts) == ["model=phi3", "parallel=3d", "precision=fp8"]
    there = with_needs("gangline-testkit")
    assert {"torch", "pytest", "hypothesis", "numpy"} <= there
    assert foreign_imports(path, there) == ["test_x.py:2: zarr is of zarr"]
    assert foreign_imports(path, with_needs("gangline-ckpt-zarr", "zarr>=3.1,<4")) == [
        "test_x.py:3: pytest is of pytest"
    ]
    path.write_text(f"pytestmark = [pytest.mark.nightly]\n{FOREIGN}")
    assert list_other_parts(path, "gangline-core", "gangline-basics") == []
    assert len(foreign_imports(path, there)) == 1, "it is collected by day"
