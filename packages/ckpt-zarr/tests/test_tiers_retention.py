"""Retention rules and intervals of each checkpoint tier, including after a rollback."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from stepping import Job

from gangline.checkpoint.base import SaveFailed
from gangline.checkpoint.id import CheckpointId
from gangline.errors import BadCheckpoint
from gangline.run import attempts
from gangline.run.attempts import Attempt


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Job]:
    """Yield a run whose disk keeps the newest two of every second step.

    The durable store gets every fourth step, and keeps the newest and every multiple of 8.
    """
    found = Job(
        tmp_path / "run",
        "checkpoint.keep_last=2",
        f"checkpoint.durable={tmp_path}/durable",
        "checkpoint.durable_every=4",
        "checkpoint.durable_keep_last=1",
        "checkpoint.durable_keep_every=8",
        "run.steps=20",
    )
    found.run_dir.mkdir()
    yield found
    found.end()


def held(job: Job) -> tuple[list[str], list[str]]:
    """Return the checkpoints (on disk, in the durable store)."""
    near, far = job.checkpointer.tiers
    return [str(id) for id in near.list_ids()], [str(id) for id in far.list_ids()]


def names(*steps: float) -> list[str]:
    """Return the names of checkpoints; 8.2 is step 8 of attempt 2."""
    return [f"step-{int(step):08d}" + (".2" if step % 1 else "") for step in steps]


def test_each_tier_applies_separate_retention_rules(kept: Job) -> None:
    kept.start()
    for step in range(1, 18):
        kept.step(step)
    assert held(kept) == (names(14, 16), names(8, 16))
    for step in (18, 19, 20):  # the last step is saved to every tier, whatever its interval
        kept.step(step)
    assert held(kept) == (names(18, 20), names(8, 16, 20))
    assert kept.load(16) == []
    assert kept.load(8) == []
    assert len(list((kept.run_dir.parent / "durable").iterdir())) == 3


def test_rollback_deletes_abandoned_checkpoints_and_keeps_others(kept: Job) -> None:
    checkpointer = kept.start()
    for step in range(1, 13):
        kept.step(step)
    assert held(kept) == (names(10, 12), names(8, 12))
    attempts.append(kept.run_dir, Attempt(2, "step-00000008"))
    assert checkpointer.find_latest() == CheckpointId(8)
    assert kept.load(8) == []
    kept.step(10, attempt=2)
    assert held(kept)[0] == names(10.2), "the abandoned ones stay, or what led here went"
    kept.step(12, attempt=2)
    assert held(kept) == (names(10.2, 12.2), names(8, 12.2))
    kept.start()
    assert kept.newest == CheckpointId(12, 2)
    assert kept.load(12, 2) == []


def test_durable_tier_replaces_damaged_or_missing_disk_checkpoint(kept: Job) -> None:
    kept.start()
    for step in range(1, 9):
        kept.step(step)
    place = kept.run_dir / "checkpoints" / "step-00000008"
    (data,) = place.rglob("*.bin")
    content = bytearray(data.read_bytes())
    content[50] ^= 4
    data.write_bytes(content)
    checkpointer = kept.start()
    assert kept.load(8) == []
    (note,) = checkpointer.take_notices()
    assert f"{data} is damaged" in note
    assert "(1 damaged file of checkpoint step-00000008)" in note
    shutil.rmtree(kept.run_dir / "checkpoints")
    checkpointer = kept.start()
    assert kept.newest == CheckpointId(8)
    assert kept.load(8) == []
    assert checkpointer.take_notices() == []
    (data,) = (kept.run_dir.parent / "durable" / "step-00000008").rglob("*.bin")
    data.unlink()
    with pytest.raises(BadCheckpoint, match="durable"):
        kept.load(8)


def test_failing_durable_tier_keeps_disk_checkpoints(kept: Job) -> None:
    """Check that the missing durable copy does not start the disk save again."""
    kept.start()
    for step in range(1, 4):
        kept.step(step)
    durable = kept.run_dir.parent / "durable"
    durable.write_text("no directory")
    with pytest.raises(SaveFailed, match="durable"):
        kept.step(4)
    assert kept.where(4) == ["disk"]
    assert kept.load(4) == []
    kept.step(6)
    durable.unlink()
    kept.step(8)
    assert held(kept) == (names(6, 8), names(8))


def test_save_removes_only_remains_of_interrupted_saves(kept: Job) -> None:
    checkpointer = kept.start()
    kept.step(2)
    near = kept.run_dir / "checkpoints"
    (near / "step-00000003" / "data-00000000").mkdir(parents=True)
    (near / "step-00000003" / "data-00000000" / "00000.bin").write_bytes(bytes(10))
    (near / "mine").mkdir()
    (near / "mine" / "notes.txt").write_text("not a checkpoint")
    assert checkpointer.list() == [CheckpointId(2)]
    kept.step(4)
    assert sorted(path.name for path in near.iterdir()) == ["mine", "step-00000002", "step-00000004"]


def test_retention_does_not_count_damaged_checkpoints(kept: Job) -> None:
    """Damage checkpoints of an earlier start; checkpoints that this start completed are trusted without a check."""
    kept.start()
    for step in (1, 2, 3, 4, 5, 6):
        kept.step(step)
    near = kept.run_dir / "checkpoints"
    assert held(kept)[0] == names(4, 6)
    (data,) = (near / "step-00000006").rglob("*.bin")
    data.write_bytes(data.read_bytes()[:-1])
    shutil.copytree(near / "step-00000004", near / "step-00000007")
    (near / "step-00000005").mkdir()
    (near / "step-00000005" / "zarr.json").write_bytes(b"")
    kept.start()
    kept.step(8)
    assert held(kept)[0] == names(4, 5, 6, 7, 8), "4 is the newest good one but for 8; what is damaged beyond it stays"
    assert kept.load(4) == []
    kept.step(10)
    assert held(kept)[0] == names(8, 10)


def test_retention_deletes_no_checkpoint_if_listing_fails(kept: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.start()
    for step in (1, 2, 3, 4):
        kept.step(step)
    checkpointer = kept.start()
    near = checkpointer.tiers[0]

    def silent(path: str = "") -> dict[str, int]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(near.store, "list_sizes", silent)
    kept.step(6)
    assert held(kept)[0] == names(2, 4, 6)
