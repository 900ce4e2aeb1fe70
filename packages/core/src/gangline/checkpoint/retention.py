"""Which checkpoints may go: one rule for every checkpointer and every tool. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from gangline.checkpoint.id import CheckpointId
from gangline.run import attempts

Lacks = Callable[[CheckpointId], str]  # why a checkpoint cannot be whole; "" where it is


def find_superfluous(
    run_dir: str,
    ids: Sequence[CheckpointId],
    keep_last: int,
    lacks: Lacks,
    others: Collection[CheckpointId] = (),
    keep_every: int | None = None,
) -> list[CheckpointId]:
    """What is neither of the newest `keep_last` that led to where the run stands nor of every `keep_every` steps.

    Nor one of `others`. `ids`: all, oldest first. Whole is what was looked at, not what has a name: one that `lacks`
    finds something wrong with counts for nothing. It stays where it is newer than what is kept, for another place may
    have what it lacks. Where nothing good is found nothing goes: what a run would resume from is never deleted.
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
    number = attempts.read_current(run_dir)  # of an attempt that is not written down nobody knows that it was abandoned
    return [id for id in ids if id not in kept_ids and id.attempt <= number]


def _is_whole(id: CheckpointId, lacks: Lacks) -> bool:
    """A store that does not answer has said nothing good."""
    try:
        return not lacks(id)
    except OSError:
        return False
