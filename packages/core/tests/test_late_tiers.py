"""Saves whose checkpoint is visible before every tier is written: the training loop and the end of a run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gangline.checkpoint.base import SaveFailed, SaveHandle, SaveState
from gangline.checkpoint.id import CheckpointId
from gangline.errors import UserError
from gangline.train.rank import train
from gangline_basics.checkpoint.torch_dcp import DcpCheckpointer
from gangline_testkit import rank
from gangline_testkit.pool import get_pool
from gangline_testkit.sessions import open_session, read_lines

BAD = "the far store is full"


class LateTier(DcpCheckpointer):
    """Checkpointer whose second tier settles after `seconds` per save, and fails in the saves `failing`."""

    def __init__(self, run_dir: str, seconds: dict[int, float], failing: list[int]) -> None:
        super().__init__(run_dir)
        self.seconds, self.failing, self.handles = seconds, failing, []

    def save(self, request, shards, registry, document):
        id = CheckpointId(request.step, document["attempt"])
        if id not in self.list():
            super().save(request, shards, registry, document)
        handle = SaveHandle(id)
        handle.visible.set_result(None)
        number = len(self.handles) + 1
        self.handles.append(handle)
        threading.Timer(self.seconds.get(number, 0.0), self.end, (handle, number in self.failing)).start()
        return handle

    def end(self, handle: SaveHandle, fails: bool) -> None:
        if fails:
            handle.settled.set_exception(SaveFailed(handle.id, BAD))
        else:
            handle.settled.set_result(None)


def lived(
    run_dir: Path, seconds: list[dict[int, float]], failing: list[int], *settings: str
) -> tuple[str, list[str], str | None, str | None]:
    """Train with a late tier and return (ending, ids of the saves, newest checkpoint, error of the failed save)."""
    s = open_session(run_dir, "run.steps=4", *settings)
    s.checkpointer = LateTier(str(run_dir), seconds[rank.index], failing)
    try:
        ending = str(train(s))
    except UserError as error:
        ending = error.what
    assert all(handle.settled.done() for handle in s.checkpointer.handles)
    return ending, [str(handle.id) for handle in s.checkpointer.handles], s.saved, s.failed_save


def test_save_handle_state_follows_futures():
    handle = SaveHandle(CheckpointId(3))
    assert handle.state is SaveState.WRITING
    handle.visible.set_result(None)
    assert handle.state is SaveState.VISIBLE
    handle.settled.set_result(None)
    assert handle.state is SaveState.SETTLED
    assert handle.progress == 1
    failed = SaveHandle(CheckpointId(3)).finish(SaveFailed(CheckpointId(3), BAD))
    assert failed.state is SaveState.FAILED
    assert failed.visible.exception() is failed.settled.exception()


def test_run_ends_once_every_save_is_settled(tmp_path):
    found = lived(tmp_path / "out", [{1: 0.6, 2: 0.3}], [])
    assert found == ("0", ["step-00000002", "step-00000004"], "step-00000004", None)


def test_late_tier_failure_keeps_the_checkpoint(tmp_path):
    found = lived(tmp_path / "out", [{}], [1], "checkpoint.every=1", "run.steps=6")
    assert found[::2] == ("0", "step-00000006")
    records = read_lines(tmp_path / "out", "metrics.jsonl")
    assert BAD in [record["failed_save"] for record in records]
    assert "step-00000001" in [record["saved"] for record in records], "it can be restored, whatever a later tier does"
    assert any(BAD in note for record in records for note in record["notes"])


def test_last_save_is_repeated_after_tier_failure(tmp_path):
    found = lived(tmp_path / "out", [{}], [2])
    assert found == ("0", ["step-00000002", "step-00000004", "step-00000004"], "step-00000004", None)


def test_repeated_last_save_failure_ends_run(tmp_path):
    ending, ids, saved, why = lived(tmp_path / "out", [{}], [2, 3])
    assert ending == f"the last checkpoint could not be saved: {BAD}"
    assert (ids[2:], saved, why) == (["step-00000004"], "step-00000004", BAD)


@pytest.mark.parametrize("failing", [[1], [2]])
def test_ranks_with_different_settle_order_end_alike(tmp_path, failing):
    """Settle the older save first on one rank, and the newer save first on the other."""
    seconds = [{1: 0.0, 2: 0.8}, {1: 0.8, 2: 0.0}]
    one, two = get_pool(2).run(lived, tmp_path / "out", seconds, failing, "parallel=ddp")
    assert one == two
    assert one[0] == "0"
    assert len(one[1]) == (2 if failing == [1] else 3)


class OddEnds(LateTier):
    """Late tier whose saves end in ways that a checkpointer should not use."""

    def end(self, handle: SaveHandle, fails: bool) -> None:
        match len(self.handles):
            case 1:
                handle.settled.cancel()
            case 2:
                handle.settled.set_exception(OSError(5, "the store is gone"))
            case _:
                handle.settled.set_result(None)


def live_with_odd_ends(run_dir: Path, checkpointer: type) -> tuple[str, list[str]]:
    s = open_session(run_dir, "run.steps=3", "checkpoint.every=1")
    s.checkpointer = checkpointer(str(run_dir), {}, [])
    return str(train(s)), [note for record in read_lines(run_dir, "metrics.jsonl") for note in record["notes"]]


def test_unexpected_save_error_does_not_end_run(tmp_path):
    ended, lines = live_with_odd_ends(tmp_path / "out", OddEnds)
    assert ended == "0"
    notes = "\n".join(lines)
    assert "checkpoint step-00000001 could not be saved: CancelledError" in notes
    assert "checkpoint step-00000002 could not be saved: OSError: [Errno 5] the store is gone" in notes


class Nothing(DcpCheckpointer):
    def __init__(self, run_dir: str, *_: object) -> None:
        super().__init__(run_dir)

    def save(self, *_: object) -> None:
        return None


def test_save_without_handle_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"Nothing\.save returned NoneType, not a SaveHandle"):
        live_with_odd_ends(tmp_path / "out", Nothing)


class Waits(LateTier):
    """Late tier that does not settle its saves."""

    def end(self, handle: SaveHandle, fails: bool) -> None:
        pass


def test_waiting_for_a_save_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("gangline.train.save._PATIENCE", 0.2)
    s = open_session(tmp_path / "out", "run.steps=1")
    s.checkpointer = Waits(str(tmp_path / "out"), {}, [])
    told = s.reporter.note

    def note(text: str) -> None:
        told(text)
        if "waiting" in text:
            notes.append(text)
            s.checkpointer.handles[0].settled.set_result(None)

    notes: list[str] = []
    monkeypatch.setattr(s.reporter, "note", note)
    assert str(train(s)) == "0"
    assert notes == ["still waiting for step-00000001 (0% written here) after 0 s"]
