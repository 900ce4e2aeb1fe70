"""Generator of the page of hooks: attributes have texts, names in its prose exist, code is shown unchanged."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import reference_hooks
from mdtext import cell, docstring_cell

from gangline.config.defaults import build_default_run
from gangline.plugin.hooks import ENTRY_POINTS

NAMES = re.compile(r"`((?:gangline|run)\.[^`\s]+)`")  # expressions in code spans


def list_expressions() -> list[str]:
    """Return the expressions of core in the texts that the generators of docs/ write by hand."""
    sources = [ast.parse(path.read_text()) for path in Path(reference_hooks.__file__).parent.glob("reference*.py")]
    texts = [node.value for tree in sources for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return sorted({name for text in texts if isinstance(text, str) for name in NAMES.findall(text)} - {ENTRY_POINTS})


def evaluate(expression: str) -> object:
    """Return the value of an expression that begins with a dotted module of core or with the default run."""
    first, *rest = re.split(r"\.", expression.partition("(")[0])
    module = first
    for name in rest:
        try:
            module = importlib.import_module(f"{module}.{name}").__name__
        except ImportError:
            break
    return eval(expression, {"gangline": importlib.import_module("gangline"), "run": build_default_run()})


def test_every_expression_in_generated_prose_can_be_evaluated():
    expressions = list_expressions()
    assert "gangline.plugin.registry.installed().find_part(run.precision).part.name" in expressions
    for expression in expressions:
        evaluate(expression)


def test_wrong_expression_is_reported():
    with pytest.raises(AttributeError):
        evaluate("gangline.plugin.registry.installed().part_of(run.precision)")


def test_cell_escapes_text_but_not_code():
    assert cell("a <b> | `<place>/x` < c") == r"a &lt;b> \| `<place>/x` &lt; c"


def test_docstring_cell_keeps_columns_as_lines():
    text = "Return how.\n\none    the first\n       of all\nthree  <the third>\n\nElse unknown."
    shown = "Return how.<br>`one`: the first of all<br>`three`: &lt;the third><br>Else unknown."
    assert docstring_cell(text) == shown


@dataclass
class Good:
    """Fields."""

    # a comment
    # of two lines
    first: int | None
    second: str = "x"  # one line
    third: dict[str, int] = field(default_factory=dict)  # a factory
    _private: int = 0


class Contract:
    """Attributes of a class without fields."""

    size: int  # number of ranks

    def reduce(self, x: int, op: str = "sum", at: str | None = None) -> list[int]:
        """Reduce."""


class Bare:
    """An attribute without a text."""

    size: int


def test_every_public_attribute_is_a_row():
    rows = ["| **`first: int \\| None`** | a comment of two lines |", '| `second: str = "x"` | one line |']
    rows.append("| `third: dict[str, int] = dict()` | a factory |")
    assert list(reference_hooks._fields(Good)) == rows
    assert list(reference_hooks._fields(Contract)) == ["| **`size: int`** | number of ranks |"]


def test_attribute_without_text_is_refused():
    with pytest.raises(ValueError, match=r"Bare\.size has no text"):
        list(reference_hooks._fields(Bare))
    with pytest.raises(ValueError, match=r"Good\._private has no text"):
        reference_hooks._descriptor("Good", Good)


def test_signature_keeps_quotes_of_defaults():
    shown = '(x: int, op: str = "sum", at: str | None = None) -> list[int]'
    assert reference_hooks._signature(Contract.reduce) == shown
