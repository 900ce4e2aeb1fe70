"""Check that a resumed run validates on the same samples as before."""

from __future__ import annotations

import shlex

from gangline.errors import UserError
from gangline.train.session import Session


def check_held_out(session: Session) -> None:
    """Compare the validation data with the last start's, on rank 0, after the checkpoint is loaded.

    Raises UserError if only the held-out part of the run's data changed. Adds a note if the training data changed too
    (the corpus grew), and for each validation set that changed.
    """
    if session.comms.rank != 0 or not session.step:
        return
    facts = session.directory.read_provenance()
    before = facts.get("validation", {}).get("fingerprint")
    if session.validation is not None and before is not None:
        source = session.validation.source
        if (now := source.compute_fingerprint()) != before:
            if not session.other_data:
                path = shlex.quote(str(session.directory.path))
                raise UserError(
                    "the held-out validation data of this run has changed.",
                    f"fingerprint {before} at the last start, {now} now ({source.describe()})",
                    "Restore the data files: losses before and after the change would not be comparable.",
                    f"To start a new run from the weights and optimizer state:  train from={path} weights={path}",
                )
            session.notes.append(describe_change("the held-out part of the data", before, now, session.step))
    for name, batches in session.validation_sets.items():
        before = facts.get("validation_sets", {}).get(name, {}).get("fingerprint")
        if before is not None and (now := batches.source.compute_fingerprint()) != before:
            session.notes.append(describe_change(f"validate.sets.{name}", before, now, session.step))


def describe_change(what: str, before: str, now: str, step: int) -> str:
    """Return the note on changed validation data."""
    return (
        f"{what} has changed (fingerprint {before} before, {now} now): losses up to step {step} and later losses are "
        "not comparable"
    )
