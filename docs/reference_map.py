"""Write the code map: each package's tree of source files, with the first sentence of each module's docstring."""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DATA = (".yaml", ".json", ".toml", ".sh", ".txt", ".j2")  # suffixes of files that the code reads
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
WIDTH = 120  # maximum number of characters in a line
FOLD = 46  # maximum width of the column of names; the phrase of a longer name is on the next line


def list_pages() -> dict[str, str]:
    """Return file name below docs/code-map/ -> its text, one for each package with code."""
    pages = {f"{path.parent.name}.md": write_page(path.parent) for path in sorted(ROOT.glob("packages/*/src"))}
    shared = [("tests/", ""), *list_tests(ROOT / "tests"), ("docs/", ""), *list_tests(ROOT / "docs")]
    top = "# Tests that need several packages\n\nTests of one package are on [its page](../code-map.md).\n\n"
    return {**pages, "tests.md": f"{top}```text\n{lay_out(shared)}\n```\n"}


def write_page(package: Path) -> str:
    """Return the page of one package."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    (source,) = (package / "src").iterdir()
    lines = [(f"src/{source.name}/", read_phrase(source / "__init__.py")), *list_entries(source, "  ")]
    tests = [("tests/", ""), *list_tests(package / "tests")]
    for folder, phrase in (("tests_on_slurm", "on a real Slurm"), ("tests_in_browser", "in a headless Chromium")):
        if (package / folder).is_dir():
            tests += [(f"{folder}/", phrase), *list_tests(package / folder)]
    return (
        f"# Source files of {project['name']}\n\n"
        f"{project['description'].rstrip('.')}. [Package page](../../packages/{package.name}/README.md) · "
        f"[all packages](../code-map.md) · [tests that need several packages](tests.md)\n\n"
        f"```text\n{lay_out(lines)}\n```\n\n## Tests\n\n```text\n{lay_out(tests)}\n```\n"
    )


def list_entries(folder: Path, indent: str) -> Iterator[tuple[str, str]]:
    """Yield (indented name, phrase) of each Python file and of each folder with Python files, files first."""
    paths = sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name))
    for path in paths:
        if path.name == "__init__.py":
            if names := [node.name for node in ast.parse(path.read_text()).body if isinstance(node, DEFINITIONS)]:
                yield indent + path.name, f"Defines {', '.join(names)}"
        elif path.suffix == ".py":
            yield indent + path.name, read_phrase(path)
        elif path.is_dir() and any(path.rglob("*.py")):
            yield f"{indent}{path.name}/", read_phrase(path / "__init__.py")
            yield from list_entries(path, indent + "  ")
        elif path.is_dir() and (data := sorted({file.suffix for file in path.iterdir() if file.suffix in DATA})):
            yield f"{indent}{path.name}/", f"Data: {', '.join(f'*{suffix}' for suffix in data)}"


def list_tests(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (indented name, phrase) of each file with tests in a folder."""
    for path in sorted(folder.glob("test_*.py")):
        yield f"  {path.name}", read_phrase(path)


def read_phrase(path: Path) -> str:
    """Return the first sentence of a module's docstring, or of a comment `# file: phrase`, without a full stop."""
    if not path.exists():
        return ""
    source = path.read_text()
    text = ast.get_docstring(ast.parse(source))
    if text is None:
        comment = re.match(r"# [\w./]+: (.*)", source)
        text = comment[1].partition(". ")[0] if comment else ""
    first = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[^.][.])\s+(?=[A-Z`])", first)[0].removesuffix(".")


def lay_out(lines: list[tuple[str, str]]) -> str:
    """Return names and phrases in two columns."""
    column = 2 + max(len(name) for name, _ in lines if len(name) < FOLD)
    rows = []
    for name, phrase in lines:
        folded = textwrap.wrap(phrase, WIDTH - column) or [""]
        if len(name) >= FOLD:
            rows.append(name)
        else:
            rows.append(f"{name:<{column}}{folded.pop(0)}".rstrip())
        rows += [" " * column + more for more in folded]
    return "\n".join(rows)
