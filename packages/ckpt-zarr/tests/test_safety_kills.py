"""kill -9 at random moments of a save: of a rank, of its writer process, of both. Nothing that was whole is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.testing.checkpointer import CheckpointerSuite


class Killed(CheckpointerSuite):
    __test__ = False
    choice = "checkpoint=zarr"
    can = frozenset({"reshard", "async", "atomic", "verify"})
    kept: tuple[str, ...] = ()

    def kept_in(self, directory: Path) -> tuple[str, ...]:
        return self.kept


@pytest.mark.parametrize("kept", [(), ("checkpoint.keep_last=2",)], ids=["all kept", "two kept"])
def test_at_twenty_moments(tmp_path: Path, kept: tuple[str, ...]) -> None:
    suite = Killed()
    suite.kept = kept
    suite.under_fire(tmp_path, 10)


@pytest.mark.nightly
def test_at_two_hundred_moments(tmp_path: Path) -> None:
    suite = Killed()
    suite.kept = ("checkpoint.keep_last=2",)
    suite.under_fire(tmp_path, 200)
