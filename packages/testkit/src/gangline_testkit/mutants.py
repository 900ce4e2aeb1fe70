"""Mutants: parts with one fault each, and functions that test a suite with them.

The suite is run on the mutant; the test that must find the fault has to fail, with a message that names it.
"""

from __future__ import annotations

import re
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from gangline_testkit.claims import find_standard_tests
from gangline_testkit.report import Result, run_file
from gangline_testkit.suite import PartSuite


@dataclass(frozen=True)
class Mutant:
    """A broken part, and the test that must find it. `saying`: a pattern that the failure's message must match."""

    choice: str
    test: str
    saying: str
    can: str = ""
    settings: str = ""
    more: str = ""  # further lines of the author's class

    def __str__(self) -> str:
        return self.choice.replace("=on", "").rpartition("=")[2]


def judge(mutant: Mutant, suite: str, place: Path, *tests: str) -> Result:
    """Run the suite, or these tests of it, on the mutant, and return the result."""
    path = place / f"test_{re.sub(r'[^a-z]', '_', str(mutant))}.py"
    lines = [
        "from gangline_testkit.scenarios import RunLayout",
        f"from gangline_testkit import {suite}",
        "",
        "",
        f"class TestMutant({suite}):",
        f"    choice = {mutant.choice!r}",
        f"    can = {set(mutant.can.split())!r}",
        f"    settings = {tuple(mutant.settings.split())!r}",
        *(f"    {line}" for line in mutant.more.splitlines()),
    ]
    path.write_text("\n".join(lines) + "\n")
    with chdir(place):  # files that a mutant leaves behind go there
        (result,) = run_file(path, [f"TestMutant::{test}" for test in tests])
    return result


def assert_found(mutant: Mutant, suite: str, place: Path) -> None:
    """Assert that the named test fails, with a message that matches `saying`."""
    result = judge(mutant, suite, place, mutant.test, "test_claims_are_known_words")
    failures = {test.partition("[")[0]: why for test, why in result.failed.items()}
    assert list(failures) == [mutant.test], f"{mutant.test} lets {mutant} pass; failed: {result.failed}"
    assert re.search(mutant.saying, failures[mutant.test]), failures[mutant.test]


def assert_only_its_behaviour(mutant: Mutant, suite: str, place: Path) -> None:
    """Assert that in the whole suite the named test fails, and every other test of `PartSuite` passes."""
    result = judge(mutant, suite, place)
    failures = {test.partition("[")[0] for test in result.failed}
    assert mutant.test in failures
    assert not failures & set(find_standard_tests(PartSuite)) - {mutant.test}, (
        "a mutant must be wrong in what it does, not in how it is offered"
    )
