"""Mutation tests of suites: a mutant is a part with one fault.

The suite runs on the mutant. The named test must fail, with a message that describes the fault.
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
    """Broken part, and the standard test that must fail. saying: regular expression that the message must match."""

    choice: str
    test: str
    saying: str
    can: str = ""
    settings: str = ""
    more: str = ""  # further lines of the suite class

    def __str__(self) -> str:
        return self.choice.replace("=on", "").rpartition("=")[2]


def judge(mutant: Mutant, suite: str, place: Path, *tests: str) -> Result:
    """Run the suite, or only `tests`, on the mutant, and return the result. place: directory for files."""
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
    with chdir(place):  # a mutant may write files into the working directory
        (result,) = run_file(path, [f"TestMutant::{test}" for test in tests])
    return result


def assert_found(mutant: Mutant, suite: str, place: Path) -> None:
    """Assert that only the mutant's test fails, with a message that matches `saying`."""
    result = judge(mutant, suite, place, mutant.test, "test_every_claim_is_known_to_the_suite")
    failures = {test.partition("[")[0]: why for test, why in result.failed.items()}
    assert list(failures) == [mutant.test], (
        f"{mutant.test} must be the only failed test on the mutant {mutant}; failed: {result.failed}"
    )
    assert re.search(mutant.saying, failures[mutant.test]), failures[mutant.test]


def assert_only_its_behaviour(mutant: Mutant, suite: str, place: Path) -> None:
    """Run the complete suite, and assert that the mutant's test fails and that all other tests of `PartSuite` pass."""
    result = judge(mutant, suite, place)
    failures = {test.partition("[")[0] for test in result.failed}
    assert mutant.test in failures
    assert not failures & set(find_standard_tests(PartSuite)) - {mutant.test}, (
        "the fault of a mutant must not affect other tests of PartSuite"
    )
