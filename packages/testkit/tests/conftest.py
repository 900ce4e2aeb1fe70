"""Fixtures shared by the tests of the testkit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gangline_testkit import as_installed
from gangline_testkit.fixtures import runs, strangers

__all__ = ["runs", "strangers"]


@pytest.fixture(scope="module")
def broken_parts() -> Iterator[None]:
    """Install the parts with one fault each."""
    with as_installed("gangline-broken", "broken_parts", path=Path(__file__).parent / "broken"):
        yield
