"""Style of docstrings, comments and test names: sentences, plain words, length.

Docstrings of functions begin with a verb.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from test_verbs import KNOWN, PACKAGES, ROOT

SHORT = 30  # a longer comment must not open with a relative clause
LONGEST = 8  # maximum number of words in the name of a test
OPENINGS = re.compile(r"(what|who|whom|whose|whoever|of|those|nobody|nothing|the same|theirs|as above)\b", re.I)
VERBS = KNOWN | {"offer", "yield"}
WORDS = re.compile(
    r"\b(anew|dear|dearer|dearest|learnt|mend|mends|mended|spoilt|unlearnt)\b|\bcomes? to nothing\b"
    r"|\bpass(es|ed) over\b|\b(be|is|are) had\b|, for (it|they|this) ",
    re.I,
)
CODE = re.compile(r"`[^`]*`")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def list_docstrings(path: Path) -> Iterator[tuple[int, Documented, str]]:
    """Yield (line, node, docstring) of each module, class and function with a docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, node, text


def list_comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every comment. Consecutive lines with only a comment count as one."""
    last, text, begun = 0, "", 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, own = token.start[0], token.line.lstrip().startswith("#")
        if own and line == last + 1:
            text += " " + token.string.lstrip("# ")
        else:
            if text:
                yield begun, text
            begun, text = line, token.string.lstrip("# ")
        last = line if own else 0
    if text:
        yield begun, text


def is_property(node: Documented) -> bool:
    """Return whether a node is a property or a fixture, whose docstring may be a noun phrase."""
    marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
    return any("property" in mark or "fixture" in mark for mark in marks)


def find_fragments(files: Iterable[Path]) -> list[str]:
    """Return function docstrings that do not begin with a verb, and texts that open with a relative clause."""
    lines = []
    for path in sorted(files):
        for line, node, text in list_docstrings(path):
            first = re.match(r"[A-Za-z]*", text)
            verb = first is not None and first[0].lower() in VERBS
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node)
            if OPENINGS.match(text) or (function and not verb):
                lines.append(f"{path}:{line} {text.splitlines()[0]}")
        for line, text in list_comments(path):
            if len(text) > SHORT and OPENINGS.match(text):
                lines.append(f"{path}:{line} {text}")
    return lines


def find_words(files: Iterable[Path]) -> list[str]:
    """Return the docstrings and comments with a word for which a plain one exists."""
    lines = []
    for path in sorted(files):
        texts = [(line, text) for line, _, text in list_docstrings(path)] + list(list_comments(path))
        lines += [f"{path}:{line} {found[0]}" for line, text in texts if (found := WORDS.search(CODE.sub("", text)))]
    return lines


def find_long_tests(files: Iterable[Path]) -> list[str]:
    """Return the names of tests with more than LONGEST words."""
    return [
        f"{path} {node.name}"
        for path in sorted(files)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and re.match("test_", node.name)
        and node.name.count("_") > LONGEST
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_are_sentences(package: str) -> None:
    assert find_fragments((ROOT / "packages" / package / "src").rglob("*.py")) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_use_plain_words(package: str) -> None:
    assert find_words((ROOT / "packages" / package / "src").rglob("*.py")) == []


def test_docstring_fragments_and_banned_words_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""Rows of a table."""\n\n\n'
        'def read():\n    """Return the rows."""\n\n\n'
        'def write():\n    """The same."""\n\n\n'
        'def close():\n    """Close `mend`, for it may change."""  # of all the rows that were read before\n\n\n'
        'class Row:\n    """What a table has."""\n\n'
        '    @property\n    def size(self):\n        """Number of cells."""\n'
        "        # the length that a row has when\n        # nobody passes over a cell\n"
    )
    assert [line.partition(" ")[2] for line in find_fragments(tmp_path.glob("*.py"))] == [
        "The same.",
        "What a table has.",
        "of all the rows that were read before",
    ]
    assert [line.split()[-1] for line in find_words(tmp_path.glob("*.py"))] == ["it", "over"]


def test_test_names_have_at_most_eight_words() -> None:
    files = [*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("tests/*.py"), *ROOT.glob("docs/*.py")]
    assert len(files) > 200
    assert find_long_tests(files) == []


def test_long_test_names_are_reported(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "def test_a_run_ends_on_a_step_boundary(): ...\n\nclass Test:\n"
        "    def test_a_run_that_is_stopped_ends_on_a_step(self): ...\n"
    )
    assert [line.split()[-1] for line in find_long_tests(tmp_path.glob("*.py"))] == [
        "test_a_run_that_is_stopped_ends_on_a_step"
    ]
