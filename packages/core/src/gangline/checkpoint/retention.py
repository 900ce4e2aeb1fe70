"""Retention: which checkpoints may be deleted, one rule for every checkpointer and every tool. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from gangline.checkpoint.id import CheckpointId
from gangline.run import attempts

Lacks = Callable[[CheckpointId], str]  # why a checkpoint is incomplete; "" if it is complete


def find_superfluous(
    run_dir: str,
    ids: Sequence[CheckpointId],
    keep_last: int,
    lacks: Lacks,
    others: Collection[CheckpointId] = (),
    keep_every: int | None = None,
) -> list[CheckpointId]:
    """Return the checkpoints to delete: all but the newest `keep_last`, each `keep_every` steps, and `others`.

    Only checkpoints that led to the run's current state are kept. ids: all, oldest first. Only checkpoints in which
    `lacks` finds no fault count for `keep_last`. Faulty ones that are newer than these stay, because another tier may
    have the missing bytes. Without a good checkpoint all stay: the one that a run would resume from is never deleted.
    """
    branch = attempts.branch(run_dir, ids) or [*reversed(ids)]  # all are abandoned: one is better than none
    kept_ids, good = {*others}, 0
    for id in branch:
        if good == keep_last:
            break
        kept_ids.add(id)
        good += _is_whole(id, lacks)
    if not good:
        return []
    if keep_every is not None:
        kept_ids |= {id for id in branch if id.step % keep_every == 0}
    number = attempts.read_current(run_dir)  # an attempt that is not written yet may not be abandoned
    return [id for id in ids if id not in kept_ids and id.attempt <= number]


def _is_whole(id: CheckpointId, lacks: Lacks) -> bool:
    """Return whether a checkpoint is complete; False if its store does not answer."""
    try:
        return not lacks(id)
    except OSError:
        return False
