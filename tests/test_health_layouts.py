"""health=on under layouts of other packages."""

from __future__ import annotations

from pathlib import Path

from gangline.testing.health_ranks import lived
from gangline.testing.pool import pool


def test_ranks_whose_weights_no_other_holds_are_told_that_nothing_is_compared(tmp_path: Path) -> None:
    settings = ("health=[on]", "parallel=fsdp", "run.steps=2")
    (notes, _), _ = pool(2).run(lived, tmp_path / "out", *settings)
    (told,) = [note for note in notes if "not-compared" in note]
    assert "compares the weights of 0 of 2 ranks" in told
