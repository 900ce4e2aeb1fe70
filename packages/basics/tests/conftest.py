"""Fixtures shared by the tests of gangline-basics."""

from gangline_testkit.fixtures import core_alone, random_batch, runs, strangers

__all__ = ["core_alone", "random_batch", "runs", "strangers"]
