"""Start of a run with another run's weights and optimizer state (`run.weights`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gangline.checkpoint.base import Checkpointer
from gangline.checkpoint.id import CheckpointId
from gangline.comm.objects import gather_json
from gangline.config.start import start_of
from gangline.errors import BadCheckpoint, UserError
from gangline.plugin import registry
from gangline.run import attempts
from gangline.run.attempts import Attempt
from gangline.run.directory import RunDirectory
from gangline.train.restore import begin, check_data, load, read_document
from gangline.train.session import Session

FACT = "weights"  # key in provenance.json


def find_parent(directory: RunDirectory) -> Path | None:
    """Return the directory of the run whose weights this run started from; None if there is no such run."""
    facts = directory.read_provenance().get(FACT)
    return Path(facts["run"]) if facts else None


def begin_with_weights(s: Session) -> bool:
    """Fill a run that has no checkpoint from the run in `run.weights`, as a resume would; return whether it did.

    The checkpoint is chosen once, in the first start, and written to provenance.json. The step number continues, and so
    does the data cursor; other data, or data in another order (by `run.seed`), is read from its first sample. Raises
    UserError if the checkpoint does not fit.
    """
    start = start_of(s.run) if s.checkpointer.find_latest() is None else None
    if start is None:
        return False
    directory, checkpoint = start
    s.history = attempts.read(s.directory.path)
    s.attempt = attempts.find_newest(s.history)
    with _explain_read_errors(s, directory):
        id = _choose(s, directory, checkpoint)
        continues = _continues(s, id)
        if bad := load(s, id, same_run=False, same_data=continues):
            others = ", ".join(str(other) for other in s.checkpointer.list() if other != id)
            raise UserError(f"weights={s.run.job.weights}: {bad}.", f"Other checkpoints: {others or 'none'}.")
    if not continues:
        s.cursor = 0
    if s.step >= s.run.steps:
        raise UserError(
            f"weights={s.run.job.weights}: checkpoint {id} has done {s.step} steps, and run.steps={s.run.steps}.",
            "The step count continues from that checkpoint, so increase run.steps:",
            f"run.steps={2 * s.step}",
        )
    _record(s, directory, id, continues)
    return True


@contextmanager
def _explain_read_errors(s: Session, directory: RunDirectory) -> Iterator[None]:
    own, run = s.checkpointer, directory.run()
    theirs: Checkpointer = registry.build(run.checkpoint, run, s.comms.store)
    s.checkpointer = theirs
    try:
        yield
    finally:
        s.checkpointer = own
        theirs.close()


def _choose(s: Session, directory: RunDirectory, wanted: CheckpointId | None) -> CheckpointId:
    """Return the checkpoint chosen in an earlier start, else `wanted`, else the newest one; equal on all ranks."""
    earlier = s.directory.read_provenance().get(FACT, {}).get("checkpoint")
    checkpoint = earlier or wanted or s.checkpointer.find_latest()
    name = gather_json(s.comms.world, None if checkpoint is None else str(checkpoint))[0]
    id = None if name is None else CheckpointId.parse(name)
    if id is None:
        raise UserError(
            f"weights={s.run.job.weights}: {directory.path} has no checkpoint.",
            "",
            f"To start with its configuration (new weights):  train from={directory.path}",
        )
    return id


def _continues(s: Session, id: CheckpointId) -> bool:
    """Return whether the run continues the checkpoint's data; True for an unreadable document, which `load` reports."""
    try:
        document = read_document(s.checkpointer, id)
        check_data(s, id, document)
    except BadCheckpoint:
        return True
    except UserError:
        return False
    return document.seed == s.run.seed  # the order of samples depends on the seed


def _record(s: Session, directory: RunDirectory, id: CheckpointId, continues: bool) -> None:
    """Record the checkpoint that the run begins with, and the samples that the other run had skipped."""
    facts = {"run": str(directory.path.resolve()), "checkpoint": str(id), "step": s.step, "sample": s.cursor}
    data = f"the data continues at sample {s.cursor}" if continues else "other data, read from its first sample"
    s.notes.append(f"begins with weights and optimizer state of {directory.path}, checkpoint {id}; {data}")
    first = not s.history
    if s.comms.rank == 0:
        s.directory.add_provenance(FACT, facts)
    begin(s, Attempt(s.attempt, None, why=f"weights of {directory.path}, {id}", data=s.other_data))
    for line in attempts.read(directory.path) if first and continues else ():
        if line.skipped and line.skipped_from + line.skipped > s.cursor:
            why = f"{attempts.SKIPPED_IN}{directory.path}"
            begin(s, Attempt(s.attempt, None, line.skipped, why, skipped_from=line.skipped_from))
    s.events.write("weights", **facts)
