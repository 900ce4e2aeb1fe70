"""Step records that wait for a checkpoint: if every step is saved, a step that was reported is never repeated.

A save overlaps with the following step. A kill before the save is visible takes the run back to the previous step, so
with `SaveRequest.record_waits` the record of the saved step goes to the trackers only when the save is visible. Until
then the record is stored in the run directory: a kill may leave a complete checkpoint of a step that no tracker has
recorded, and the next start passes the record on.
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

FILE = ".unreported"  # file whose first line is the waiting record, or empty


def report(s: Session, record: StepRecord, waits: bool) -> None:
    """Pass a step's record to the trackers, on rank 0. waits: whether to wait for the save that begins now.

    At most one record waits, because a save begins only when the previous save is visible.
    """
    _release(s)
    if waits and s.comms.rank == 0:
        with hold(s.directory.path):
            _write(s.directory.path / FILE, json.dumps(asdict(record)))
        s.unreported = record
    else:
        _hand_over(s, record)


def flush(s: Session) -> None:
    """Pass the waiting record to the trackers, if its checkpoint is visible or its save has failed."""
    if s.newest is not None and s.newest.visible.done():
        _release(s)


def _release(s: Session) -> None:
    if s.unreported is not None:
        record, s.unreported = s.unreported, None
        _hand_over(s, record)
        _write(s.directory.path / FILE, "")


def recover(s: Session) -> None:
    """Pass on the record that an earlier start left, if it is of the step that the run resumes from."""
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
    """Replace the file's first line in one call, so that a kill leaves the old or the new line."""
    handle = open_handle(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        os.pwrite(handle, f"{line}\n".encode(), 0)
    finally:
        os.close(handle)


def _read(path: Path) -> StepRecord | None:
    """Return the record in the file; None without a record, also if a machine crash left an incomplete line."""
    with contextlib.suppress(ValueError, TypeError):
        return StepRecord(**json.loads(read_regular(path).partition(b"\n")[0]))
    return None
