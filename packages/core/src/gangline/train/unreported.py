"""Records that wait for a checkpoint: where every step is kept, no step that people were told of is ever done again.

A save goes on beside the next step. Until it is whole a kill takes the run back to the step before, so the record of a
step whose save promises to keep it (`SaveRequest.record_waits`) is handed to the trackers only then. It lies in the run
directory meanwhile: a kill in between may leave a whole checkpoint of a step that no tracker has seen, and the next
start hands the record over.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from gangline.checkpoint.id import CheckpointId
from gangline.record import StepRecord
from gangline.run.generation import hold
from gangline.storage.files import open_handle, read_regular
from gangline.train.session import Session

FILE = ".unreported"  # its first line: the record that waits, or nothing


def report(s: Session, record: StepRecord, waits: bool) -> None:
    """Hand a step's record to the trackers, on rank 0; `waits`: once the save that begins now is visible.

    One record waits at a time: another save begins once the one before is visible.
    """
    _release(s)
    if waits and s.comms.rank == 0:
        with hold(s.directory.path):
            _write(s.directory.path / FILE, json.dumps(asdict(record)))
        s.unreported = record
    else:
        _hand_over(s, record)


def flush(s: Session) -> None:
    """Hand over the record that waits, if its checkpoint is visible or its save has failed."""
    if s.newest is not None and s.newest.visible.done():
        _release(s)


def _release(s: Session) -> None:
    if s.unreported is not None:
        record, s.unreported = s.unreported, None
        _hand_over(s, record)
        _write(s.directory.path / FILE, "")


def recover(s: Session) -> None:
    """Hand over what an earlier start could not: the record of the step that the run goes on from."""
    path = s.directory.path / FILE
    if s.comms.rank != 0 or not path.exists():
        return
    record = _read(path)
    if record is not None and str(CheckpointId(record.step, record.attempt)) == s.saved:
        _hand_over(s, record)
    with hold(s.directory.path):
        _write(path, "")


def _hand_over(s: Session, record: StepRecord) -> None:
    if s.comms.rank == 0:
        with hold(s.directory.path, record.step):
            s.reporter.record(record)
    else:
        s.reporter.record(record)


def _write(path: Path, line: str) -> None:
    """In one call, over what is there: a kill leaves the old line or the new one."""
    handle = open_handle(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        os.pwrite(handle, f"{line}\n".encode(), 0)
    finally:
        os.close(handle)


def _read(path: Path) -> StepRecord | None:
    """None also where the machine went down in the middle of a line."""
    with contextlib.suppress(ValueError, TypeError):
        return StepRecord(**json.loads(read_regular(path).partition(b"\n")[0]))
    return None
