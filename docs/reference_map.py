"""Write the code map: each package's tree of source files, with the first sentence of each module's docstring."""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
WIDTH = 120  # maximum number of characters in a line
FOLD = 46  # maximum width of the column of names; the phrase of a longer name is on the next line


def list_pages() -> dict[str, str]:
    """Return file name below docs/code-map/ -> its text, one for each package with code."""
    return {f"{path.parent.name}.md": write_page(path.parent) for path in sorted(ROOT.glob("packages/*/src"))}


def write_page(package: Path) -> str:
    """Return the page of one package."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    (source,) = (package / "src").iterdir()
    lines = [("packages/" + package.name + "/", ""), ("  tests/", "tests of this package alone")]
    if (package / "tests_on_slurm").is_dir():
        lines.append(("  tests_on_slurm/", "tests on a real Slurm"))
    lines += [(f"  src/{source.name}/", read_phrase(source / "__init__.py")), *list_entries(source, "    ")]
    return (
        f"# Source files of {project['name']}\n\n"
        f"{project['description'].rstrip('.')}. [Package page](../../packages/{package.name}/README.md) · "
        f"[all packages](../code-map.md)\n\n```text\n{lay_out(lines)}\n```\n"
    )


def list_entries(folder: Path, indent: str) -> Iterator[tuple[str, str]]:
    """Yield (indented name, phrase) of each Python file and of each folder with Python files, files first."""
    paths = sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name))
    for path in paths:
        if path.suffix == ".py" and path.name != "__init__.py":
            yield indent + path.name, read_phrase(path)
        elif path.is_dir() and any(path.rglob("*.py")):
            yield f"{indent}{path.name}/", read_phrase(path / "__init__.py")
            yield from list_entries(path, indent + "  ")


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
