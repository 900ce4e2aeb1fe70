"""kill -9 of ranks and writer processes at random moments of a save: no complete checkpoint is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gangline.run import attempts
from gangline.run.attempts import Attempt
from gangline_ckpt_zarr.tiers import places
from gangline_testkit.checkpointer import CheckpointerSuite


class Killed(CheckpointerSuite):
    __test__ = False
    choice = "checkpoint=zarr"
    can = frozenset({"reshard", "async", "atomic", "verify"})
    kept: tuple[str, ...] = ()

    def get_local_settings(self, directory: Path) -> tuple[str, ...]:
        return self.kept


@pytest.mark.parametrize("moments", [4, pytest.param(200, marks=pytest.mark.nightly)])
def test_kills_with_keep_last_2_lose_no_checkpoint(tmp_path: Path, moments: int) -> None:
    """Kill saves that delete old checkpoints; the conformance suite kills saves that keep all."""
    suite = Killed()
    suite.kept = ("checkpoint.keep_last=2",)
    suite.save_under_kills(tmp_path, moments)


@pytest.mark.nightly
def test_kills_without_keep_last_lose_no_checkpoint(tmp_path: Path) -> None:
    Killed().save_under_kills(tmp_path, 20)


@pytest.mark.parametrize("moments", [3, pytest.param(60, marks=pytest.mark.nightly)])
def test_kills_with_memory_tier_lose_no_checkpoint(tmp_path: Path, moments: int) -> None:
    """Check that a checkpoint left in memory by a killed save is complete or not visible."""
    attempts.append(tmp_path, Attempt(1, None))  # a started run: the checkpoints in memory belong to it
    suite = Killed()
    suite.kept = ("checkpoint.memory_every=1", "checkpoint.keep_last=2")
    try:
        suite.save_under_kills(tmp_path, moments)
    finally:
        shutil.rmtree(places.locate_node(tmp_path), ignore_errors=True)
