"""The order of tests: files that start whole runs first, where several cores share the tests.

`pytest --seconds 90`: as many tests as that time allows, those of changed files first, then the short ones. How long
each took is kept in pytest's cache by every run; one that was never run counts as short.

Numbers drawn are the same in each run by day.
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

KEPT = "gangline/seconds"  # test -> what it took when it last ran
RUNS = {"runs", "curves", "torchruns", "running"}  # fixtures of tests that start whole runs
STARTS = {"RealRuns", "get_pool"}  # what a file imports whose tests start whole runs or many ranks
WAITING = {"subprocess", "threading", "time"}  # what a file imports whose tests wait for processes, threads or a clock
FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, help="skip the tests that are left after so many seconds")


def pytest_configure(config: pytest.Config) -> None:
    draw_alike(by_day=config.getoption("markexpr") != "nightly")
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for signum, handler in usual.items():
        if signal.getsignal(signum) == signal.SIG_IGN:  # a shell's background, nohup; tests' commands would inherit it
            signal.signal(signum, handler)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times(config))
    if config.getoption("--seconds"):
        config.pluginmanager.register(InTime(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest is not left to one core at the end.

    A test that waits for processes or for the clock may fail because a loaded machine let it wait too long. Where
    pytest-rerunfailures is installed it is tried once more, unless it has found a wrong number; how it failed at first
    is printed at the end of the run.
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
    """By day hypothesis draws the same examples each time, at night others; a busy machine is no failure."""
    with suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("gangline", deadline=None, derandomize=by_day)
        settings.load_profile("gangline")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws is the same whatever ran before it, and each time; it need not seed for that."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def starts_runs(item: pytest.Item) -> bool:
    """Return whether a test, or another one of its file, starts whole runs or many ranks."""
    module = getattr(item, "module", None)
    return bool(RUNS & {*getattr(item, "fixturenames", ())} or STARTS & {*vars(module or object)})


def waits(item: pytest.Item) -> bool:
    """Whether another process, a thread or the clock may decide on it; all else computes, and fails for good."""
    module = getattr(item, "module", None)
    return bool(
        RUNS & {*getattr(item, "fixturenames", ())}
        or WAITING & {*vars(module or object)}
        or item.get_closest_marker("waits")
    )


# How an assertion tells of numbers that are not those expected: by `pytest.approx`, by torch and numpy, by the kit's
# `gangline_testkit.compare`, and by == of what is no round number. What is compared by < and > may be of a clock, and
# whole numbers and lists of steps may be of a start too many: those are tried again.
_WRONG_NUMBER = re.compile(
    r"^(AssertionError: )?assert .*(±|\d\.\d{6,}.* [!=]= |[!=]= .*\d\.\d{6,})|comparison failed|Mismatched elements"
    r"|difference \S+, allowed |are not bit-identical| is -?[\d.e+-]+, expected "
    r"|(are|is) not (close|equal)|Not equal to tolerance|where False = .*\b(isclose|allclose|equal|array_equal)\b",
    re.MULTILINE,
)


def may_have_waited(error: BaseException | None) -> bool:
    """Whether a loaded machine may be why a test has failed: it is no reason for a number that is wrong."""
    return _WRONG_NUMBER.search(f"{type(error).__name__}: {error}") is None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = report.failed
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test that is tried again begins with new fixtures, also those of its class, its file and the session.

    It may have used them up: ended a process that a fixture started, begun a run in a directory of all its file. With
    the same ones the second try would fail with certainty. After its last try it leaves nothing half used to others.
    """
    if item.stash.get(FAILED, False) and item.get_closest_marker("flaky"):
        item.session._setupstate.teardown_exact(None)  # as pytest-rerunfailures does, which would keep them


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """No garbage is looked for while modules are imported: that took a quarter of the time, and there is hardly any."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What is loaded by now stays: no later collection of garbage looks through it again, a tenth of a second each."""
    gc.collect()
    gc.freeze()


class Times:
    """Notes what each test takes."""

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
    """Puts the tests in order, and skips those that come too late."""

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
    """The files that differ from the last commit."""
    said = subprocess.run(["git", "status", "--porcelain", "-uall"], cwd=root, capture_output=True, text=True).stdout
    return {root / line[3:].rpartition(" -> ")[2].strip('"') for line in said.splitlines()}
