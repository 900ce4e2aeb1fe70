"""Order the tests: with several workers, test files that start training runs come first.

`pytest --seconds 90` runs as many tests as fit into 90 s: tests of changed files first, then the shortest tests. Every
test session stores the duration of each test in pytest's cache; a test without a stored duration counts as short.

Random numbers are the same in each session, except in nightly tests.
"""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

KEPT = "gangline/seconds"  # cache key; test -> duration in seconds at its last run
RUNS = {"runs", "curves", "torchruns", "running"}  # fixtures of tests that start training runs
STARTS = {"RealRuns", "get_pool"}  # names that a test file imports if its tests start training runs or many ranks
# modules that a test file imports if its tests wait for processes, threads or a clock
WAITING = {"subprocess", "threading", "time"}
FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, help="skip the tests that are left after so many seconds")


def pytest_configure(config: pytest.Config) -> None:
    draw_alike(by_day=config.getoption("markexpr") != "nightly")
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for signum, handler in usual.items():
        # shells set this for background jobs and nohup; commands that tests start would inherit it
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, handler)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times(config))
    if config.getoption("--seconds"):
        config.pluginmanager.register(InTime(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest test files first, so that no worker runs them alone at the end.

    A test that waits for processes or for the clock may fail because the machine is busy. If pytest-rerunfailures is
    installed, such a test is retried once, unless it failed because of a wrong number. The first failure is printed at
    the end of the session.
    """
    if config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            if waits(item):
                item.add_marker(pytest.mark.flaky(reruns=1, condition=may_have_waited))
    if hasattr(config, "workerinput") and not config.getoption("--seconds"):
        longest = {item.path for item in items if item.get_closest_marker("longest")}
        long = {item.path for item in items if starts_runs(item)}
        items.sort(key=lambda item: (item.path not in longest, item.path not in long))


def draw_alike(by_day: bool) -> None:
    """Make hypothesis draw the same examples in every session, except in nightly tests. Examples have no deadline."""
    with suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("gangline", deadline=None, derandomize=by_day)
        settings.load_profile("gangline")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed torch and numpy before each test, so that a test draws the same numbers whatever ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def starts_runs(item: pytest.Item) -> bool:
    """Return whether a test, or another test of its file, starts training runs or many ranks."""
    module = getattr(item, "module", None)
    return bool(RUNS & {*getattr(item, "fixturenames", ())} or STARTS & {*vars(module or object)})


def waits(item: pytest.Item) -> bool:
    """Return whether a test depends on another process, a thread or the clock; a failure of other tests is final."""
    module = getattr(item, "module", None)
    return bool(
        RUNS & {*getattr(item, "fixturenames", ())}
        or WAITING & {*vars(module or object)}
        or item.get_closest_marker("waits")
    )


# Patterns of assertion messages about wrong numbers: of `pytest.approx`, torch, numpy, `gangline_testkit.compare`, and
# of == with a fractional number. Comparisons with < and > may be about times, and integers or lists of steps may be
# about an additional restart, so those tests are retried.
_WRONG_NUMBER = re.compile(
    r"^(AssertionError: )?assert .*(±|\d\.\d{6,}.* [!=]= |[!=]= .*\d\.\d{6,})|comparison failed|Mismatched elements"
    r"|difference \S+, allowed |are not bit-identical| is -?[\d.e+-]+, expected "
    r"|(are|is) not (close|equal)|Not equal to tolerance|where False = .*\b(isclose|allclose|equal|array_equal)\b",
    re.MULTILINE,
)


def may_have_waited(error: BaseException | None) -> bool:
    """Return whether a busy machine may be the cause of a failure: true, except for wrong numbers."""
    return _WRONG_NUMBER.search(f"{type(error).__name__}: {error}") is None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = report.failed
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Tear down all fixtures after a failed test that is retried, also those of its class, file and session.

    The test may have changed the fixtures: killed a process that a fixture started, or started a run in a shared
    directory. With the same fixtures the retry would fail too. After the last try, other tests get no changed fixtures
    either.
    """
    if item.stash.get(FAILED, False) and item.get_closest_marker("flaky"):
        item.session._setupstate.teardown_exact(None)  # pytest-rerunfailures does the same, but keeps those fixtures


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Turn off garbage collection during imports: it took a quarter of the time and found almost no garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude all objects that exist now from garbage collection, which saves 0.1 s per collection."""
    gc.collect()
    gc.freeze()


class Times:
    """Records the duration of each test."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.skipped:
            self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + round(report.duration, 2)

    def pytest_sessionfinish(self) -> None:
        cache: Any = getattr(self.config, "cache", None)
        if cache is not None:
            cache.set(KEPT, {**cache.get(KEPT, {}), **self.seconds})


class InTime:
    """Sorts the tests for `--seconds`, and skips tests after the time limit."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.end = time.monotonic() + config.getoption("--seconds")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        cache: Any = getattr(self.config, "cache", None)
        took = cache.get(KEPT, {}) if cache is not None else {}
        fresh = changed(self.config.rootpath)
        items.sort(key=lambda item: (item.path not in fresh, took.get(item.nodeid, 0.0)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self.end:
            pytest.skip("no time was left")


def changed(root: Path) -> set[Path]:
    """Return the files that differ from the last commit."""
    said = subprocess.run(["git", "status", "--porcelain", "-uall"], cwd=root, capture_output=True, text=True).stdout
    return {root / line[3:].rpartition(" -> ")[2].strip('"') for line in said.splitlines()}
