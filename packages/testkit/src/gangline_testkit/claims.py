"""Claims of a part's author, tested both ways, and waivers of standard tests, which are always reported.

A test of a claim runs whether it is claimed or not. Claimed, it must pass. Unclaimed, it is a probe:
if it passes, an `Unclaimed` warning says so. No test is ever skipped.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest

LAYOUT = "layout"  # claimed for every part that does not declare `Part.layout_dependent`
LAYOUT_CLAIM = {LAYOUT: "the same under any layout; claimed by every part without `Part.layout_dependent`"}
_LOSSY = (
    "Does the part lose precision with these settings? Test it with those that lose nothing (`settings = (...)`), and "
    "declare in Part.layout_dependent what it loses with others."
)


class Unclaimed(UserWarning):
    """Warning that a part passes the test of a capability that its author does not claim."""

    def __init__(self, choice: str, capability: str, test: str) -> None:
        self.choice, self.capability = choice, capability
        super().__init__(f'{choice} could claim "{capability}": {test} passes')


class Waived(UserWarning):
    """Warning that a standard test does not run for this part; the message is the reason."""

    def __init__(self, choice: str, reason: str) -> None:
        self.choice, self.reason = choice, reason
        super().__init__(f"{choice}: {reason}")


def mark_capability(capability: str) -> Callable[[Callable], Callable]:
    """Mark a standard test as the test of one capability, a word of its suite's `CLAIMS`."""

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
    """Return whether a suite's tests of a capability must pass: its author claims it, or it holds for every part."""
    return capability in suite.can or (capability == LAYOUT and not suite.offer.part.layout_dependent)


def waive(reason: str) -> Callable:
    """Return a stand-in for a standard test that does not fit: ``test_x = waive("why")``. The report shows the reason.

    Raises ValueError if the reason is empty.
    """
    if not reason.strip():
        raise ValueError("a waived test needs a reason")

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
