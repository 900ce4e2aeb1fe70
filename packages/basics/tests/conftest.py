"""The fixtures that the tests of the package share."""

from gangline_testkit.fixtures import core_alone, random_batch, runs, strangers

__all__ = ["core_alone", "random_batch", "runs", "strangers"]
