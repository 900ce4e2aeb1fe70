"""`run.gc_every`: Python's garbage collection at the same steps on all ranks."""

from __future__ import annotations

import gc

import pytest

from gangline.train import rank
from gangline_testkit.sessions import open_session


@pytest.mark.parametrize(("every", "expected"), [("2", [2, 4]), ("null", [])])
def test_garbage_is_collected_at_multiples_of_interval_alone(tmp_path, every, expected) -> None:
    """Record the collections of a run while automatic collection is off."""
    s, steps = open_session(tmp_path / "out", "run.steps=5", f"run.gc_every={every}"), []

    def note(phase: str, about: object) -> None:
        if phase == "start" and not gc.isenabled():
            steps.append(s.step)

    gc.callbacks.append(note)
    try:
        rank.train(s)
    finally:
        gc.callbacks.remove(note)
    assert steps == expected
    assert gc.isenabled()


def test_collection_is_automatic_again_after_an_error() -> None:
    frozen = gc.get_freeze_count()

    def fail() -> None:
        with rank.pause_collection(50):
            assert not gc.isenabled()
            assert gc.get_freeze_count() > frozen, "a collection scans all objects of the process"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
