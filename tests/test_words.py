"""Vocabulary of the code: replaced synonyms do not return, and shape letters mean what the glossary says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
# package -> replaced names: complete identifiers and names of modules
ONCE = {
    "core": "micro micros micro_batch micro_batches Named Piece Here travels",
    "parallel-megatron-style": "micro micros Flat Sums WeightGradients deposit put_off hand_over sight Named Piece",
    "moe": "Exchange by_node ByNode Direct limited sight",
    "ckpt-zarr": "Cell cell cells Lying lying alike opened told say hear alive sight",
}


def public(source: Path) -> Iterator[str]:
    """Yield the public names of a package: modules, classes, functions, parameters and fields."""
    for path in sorted(source.rglob("*.py")):
        yield path.stem
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield node.name
                yield from (
                    each.target.id
                    for each in node.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                )
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield node.name
                yield from (arg.arg for arg in (*node.args.args, *node.args.kwonlyargs))


@pytest.mark.parametrize("package", ONCE)
def test_replaced_synonyms_are_not_used(package: str) -> None:
    found = set(public(ROOT / "packages" / package / "src")) & set(ONCE[package].split())
    assert found == set()


def letters() -> dict[str, str]:
    """Return shape letter -> its meaning in the glossary."""
    section = GLOSSARY.partition("## Shape letters")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([A-Za-z, ]+) \| (.+) \|$", section, re.MULTILINE)
    return {letter: text for names, text in rows for letter in names.split(", ") if len(letter) == 1}


def legends() -> Iterator[tuple[str, str, str]]:
    """Yield (file, letter, meaning) from lines such as "B batch, T tokens, D model width" of module docstrings."""
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        for line in (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines():
            pairs = [re.match(r"([A-Zkt]) ([a-z]\w*)", part) for part in line.split(", ")]
            if len(pairs) > 1 and pairs[0] and pairs[1]:
                yield from ((path.name, found[1], found[2]) for found in pairs if found)


def test_legend_letters_match_glossary() -> None:
    known = letters()
    assert len(known) > 15
    assert len(list(legends())) > 20
    other = [(file, letter, word) for file, letter, word in legends() if word.rstrip("s") not in known.get(letter, "")]
    assert other == []


def test_shape_suffix_letters_are_in_glossary() -> None:
    known = letters()
    used = set()
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for suffix in re.findall(r"\b[a-z][a-z0-9_]*_([A-Z][A-Zkt]*)\b", path.read_text()):
            used |= {(letter, suffix) for letter in suffix if letter not in known}
    assert used == set()
