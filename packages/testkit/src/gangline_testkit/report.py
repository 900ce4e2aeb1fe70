"""Run conformance suites with pytest in this process, and collect the results of each part."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gangline.config.schema import EditConfig
from gangline.plugin.discovery import Offer
from gangline.plugin.registry import installed
from gangline_testkit.claims import Unclaimed, Waived, claims


@dataclass
class Result:
    """Test results of one part."""

    choice: str
    suite: str
    claims: set[str] = field(default_factory=set)
    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # test -> first line of its error
    could_claim: list[str] = field(default_factory=list)
    waived: list[str] = field(default_factory=list)  # "test: reason"


def find_suite(offer: Offer) -> str:
    """Return the suite of a part as "package.module:Class": the suite of the plugin kind for the group of the part."""
    if issubclass(offer.part.config, EditConfig):
        return "gangline_testkit:ModelEditSuite"
    fitting = (kind.suite for kind in installed().get_kinds().values() if kind.group == offer.group)
    return next(fitting, "gangline_testkit:PartSuite")


def generate_tests(offers: Iterable[Offer], verbs: Iterable[str] = ()) -> str:
    """Return the text of a test file with a suite for each part and each command, without claims."""
    suites = [(find_suite(offer), f"{offer.group}={offer.part.name}") for offer in offers]
    suites += [("gangline_testkit:CommandSuite", f"gangline {verb}") for verb in verbs]
    lines = []
    for number, (suite, choice) in enumerate(suites):
        module, _, name = suite.partition(":")
        lines += [
            f"from {module} import {name}",
            "",
            "",
            f"class Test{number}({name}):",
            f"    choice = {choice!r}",
            "",
        ]
    return "\n".join(lines)


def run_file(path: Path, tests: Sequence[str] = ()) -> list[Result]:
    """Run a test file, or only `tests` in the file ("TestMine::test_name"), and return a result for each class.

    Raises RuntimeError if the file cannot be collected.
    """
    collector = _Collector()
    options = ["-p", "no:terminal", "-p", "no:cacheprovider", "--import-mode=importlib", "-o", "addopts="]
    # Ignore the pytest settings of the working directory, and conftest files in the folders above.
    options += ["-c", os.devnull, "--rootdir", str(path.parent), "--confcutdir", str(path.parent)]
    options += ["-p", "no:unraisableexception"]  # this plugin runs garbage collection five times
    node_ids = [f"{path}::{test}" for test in tests] or [str(path)]
    code = pytest.main([*options, *node_ids], plugins=[collector])
    for name, module in list(sys.modules.items()):  # so that another test file of this name is imported
        if getattr(module, "__file__", None) == str(path):
            del sys.modules[name]
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest could not run {path} ({code!r}): {collector.trouble or 'no error was reported'}")
    return collector.list_results()


class _Collector:
    """Pytest plugin that records the result of each test of a suite."""

    def __init__(self) -> None:
        self.trouble = ""
        self._found: dict[type, Result] = {}
        self._suites: dict[str, type] = {}  # by test id
        self._probes: Counter[tuple[type, str]] = Counter()
        self._held: Counter[tuple[type, str]] = Counter()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            if not hasattr(item.cls, "choice"):
                continue
            self._suites[item.nodeid] = item.cls
            if item.cls not in self._found:
                suite = next(base for base in item.cls.__mro__ if base.__module__ != item.cls.__module__)
                self._found[item.cls] = Result(item.cls.choice, suite.__name__, set(item.cls.can))
            capability = getattr(item.function, "capability", None)
            if parameter := getattr(item.function, "capability_in", None):
                capability = item.callspec.params[parameter]
            if capability is not None and not claims(item.cls(), capability):
                self._probes[item.cls, capability] += 1

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.trouble = str(report.longrepr)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.nodeid not in self._suites:
            return
        result, test = self._found[self._suites[report.nodeid]], report.nodeid.rpartition("::")[2]
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash is not None else str(report.longrepr)
            result.failed[test] = message.strip().partition("\n")[0]
        elif report.when == "call":
            result.passed += 1

    def pytest_warning_recorded(self, warning_message: Any, nodeid: str) -> None:
        warning = warning_message.message
        if isinstance(warning, Unclaimed):
            self._held[self._suites[nodeid], warning.capability] += 1
        if isinstance(warning, Waived):
            result = self._found[self._suites[nodeid]]
            result.passed -= 1
            result.waived.append(f"{nodeid.rpartition('::')[2]}: {warning.reason}")

    def list_results(self) -> list[Result]:
        """Return the results in file order. A capability is reported as claimable if all its probes passed."""
        for (suite, capability), count in self._probes.items():
            if self._held[suite, capability] == count:
                self._found[suite].could_claim.append(capability)
        return list(self._found.values())
