"""Rollback: choice of the checkpoint for a response, the samples to skip, and the return to the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gangline.checkpoint.id import CheckpointId
from gangline.errors import BadCheckpoint
from gangline.health import Action, Response
from gangline.run import attempts
from gangline.run.attempts import Attempt
from gangline.train.restore import agree_on_damage, begin, holds_weights_alone, list_common, load, read_document
from gangline.train.session import Session


def roll_back(session: Session, response: Response, line: Attempt) -> bool:
    """Roll back to the best undamaged checkpoint that the response allows; return False if there is none."""
    failed_attempt = 0
    for checkpoint, start_line in return_points(session, response, line):
        session.attempt = start_line.attempt
        begin(session, replace(start_line, instead=failed_attempt))
        session.history = attempts.list_standing(session.history)
        bad = load(session, checkpoint)
        if bad is None:
            session.saved, session.newest = str(checkpoint), None
            return True
        session.notes.append(f"{bad}; falling back to the previous checkpoint")
        failed_attempt = start_line.attempt
    return False


def return_points(session: Session, response: Response, line: Attempt) -> Iterator[tuple[CheckpointId, Attempt]]:
    """Yield (checkpoint, copy of `line` that starts there) for each checkpoint that the response allows, best first."""
    read = session.cursor
    for checkpoint in list_allowed(response, attempts.branch(session.directory.path, list_common(session))):
        cursor, bad = _read_cursor(session, checkpoint)
        if why := agree_on_damage(session, checkpoint, bad):
            session.notes.append(f"{checkpoint}: {why}; falling back to the previous checkpoint")
            continue
        passes_all = response.skip is None and response.action is Action.ROLL_BACK
        skipped = read - cursor if passes_all else response.skip or 0
        at = replace(line, attempt=session.attempt + 1, start=str(checkpoint), rate_from=checkpoint.step)
        yield checkpoint, replace(at, skipped=skipped, skipped_from=cursor)


def list_allowed(response: Response, known: list[CheckpointId]) -> list[CheckpointId]:
    """Return the checkpoints that a response allows, the best first. known: all checkpoints, newest first."""
    if response.before_step is None:
        return known
    earlier_ids = [id for id in known if id.step < response.before_step]
    later = [id for id in known if response.before_step <= id.step < (response.else_before or 0)]
    return earlier_ids + later[::-1]


def _read_cursor(session: Session, id: CheckpointId) -> tuple[int, str]:
    """Return (data cursor of a checkpoint, reason why the run cannot return to it or "")."""
    try:
        if holds_weights_alone(session, id):
            return 0, "the initial optimizer state is unknown"
        return read_document(session.checkpointer, id).cursor, ""
    except BadCheckpoint as error:
        return 0, str(error)
