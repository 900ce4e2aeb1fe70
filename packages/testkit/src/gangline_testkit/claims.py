"""Claims of a part, which tests verify, and waivers of standard tests, which reports list with their reasons.

The test of a claim always runs. If the author claims the capability, the test must pass. Otherwise the test is a probe:
a probe that passes emits the warning `Unclaimed`. No test is skipped.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest

LAYOUT = "layout"  # name of the claim that is implied for every part without `Part.layout_dependent`
LAYOUT_CLAIM = {LAYOUT: "Results in every layout match one process (implied unless `Part.layout_dependent` is set)."}
_LOSSY = (
    "If the part is lossy with these settings, test it with lossless settings (`settings = (...)` in the suite class), "
    "and describe the loss of other settings in Part.layout_dependent."
)


class Unclaimed(UserWarning):
    """Warning that a part passes the test of a capability that its author does not claim."""

    def __init__(self, choice: str, capability: str, test: str) -> None:
        self.choice, self.capability = choice, capability
        super().__init__(f'{choice} could claim "{capability}": {test} passes')


class Waived(UserWarning):
    """Warning that the author waived a standard test of this part; the message is the reason."""

    def __init__(self, choice: str, reason: str) -> None:
        self.choice, self.reason = choice, reason
        super().__init__(f"{choice}: {reason}")


def mark_capability(capability: str) -> Callable[[Callable], Callable]:
    """Mark a standard test as the test of one capability: a key of its suite's `CLAIMS`."""

    def mark(test: Callable) -> Callable:
        @functools.wraps(test)
        def run_either(self: Any, *args: Any, **kwargs: Any) -> None:
            if claims(self, capability):
                try:
                    test(self, *args, **kwargs)
                except (Exception, pytest.fail.Exception) as error:
                    if capability == LAYOUT:
                        error.add_note(_LOSSY)
                    raise
                return
            try:
                test(self, *args, **kwargs)
            except (Exception, pytest.fail.Exception):  # a failed pytest.raises is not an Exception
                return
            warnings.warn(Unclaimed(self.choice, capability, test.__name__), stacklevel=2)

        run_either.capability = capability  # type: ignore[attr-defined]
        return run_either

    return mark


def claims(suite: Any, capability: str) -> bool:
    """Return whether a suite's tests of a capability must pass: the author claims the capability, or it is implied."""
    return capability in suite.can or (capability == LAYOUT and not suite.offer.part.layout_dependent)


def waive(reason: str) -> Callable:
    """Return a replacement for a standard test that does not apply: ``test_x = waive("why")``. Reports show the reason.

    Raises ValueError if the reason is empty.
    """
    if not reason.strip():
        raise ValueError('a waived test needs a reason: test_x = waive("why")')

    def test(self: Any) -> None:
        warnings.warn(Waived(self.choice, reason), stacklevel=2)

    test.waived = reason  # type: ignore[attr-defined]
    return test


def find_standard_tests(cls: type) -> dict[str, Callable]:
    """Return the kit's tests that a suite class inherits, by name."""
    tests: dict[str, Callable] = {}
    for base in cls.__mro__:
        if base.__module__.startswith("gangline_testkit."):
            own = {name: thing for name, thing in vars(base).items() if name.startswith("test_")}
            tests = {**own, **tests}
    return tests


def find_overridden(cls: type) -> list[str]:
    """Return the names of standard tests that a class replaces or deletes without `waive`."""
    return [
        name
        for name, test in find_standard_tests(cls).items()
        if (attribute := inspect.getattr_static(cls, name, None)) is not test and not getattr(attribute, "waived", "")
    ]
