"""Retention of checkpoints: one rule, for every checkpointer and tool, of what may be deleted. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from gangline.checkpoint.id import CheckpointId
from gangline.run import attempts

Lacks = Callable[[CheckpointId], str]  # (id) -> why the checkpoint is incomplete; "" if it is complete


def find_superfluous(
    run_dir: str,
    ids: Sequence[CheckpointId],
    keep_last: int,
    lacks: Lacks,
    others: Collection[CheckpointId] = (),
    keep_every: int | None = None,
) -> list[CheckpointId]:
    """Return the checkpoints to delete. Kept: the newest `keep_last`, those at multiples of `keep_every`, and `others`.

    Of abandoned branches only `others` are kept. ids: all checkpoints, oldest first. Only complete checkpoints (by
    `lacks`) count for `keep_last`; newer incomplete checkpoints are kept, because another tier may have the missing
    bytes. Without a complete checkpoint all are kept, so the checkpoint for a resume is never deleted.
    """
    branch = attempts.branch(run_dir, ids) or [*reversed(ids)]  # if all checkpoints are abandoned, keep the newest
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
    number = attempts.read_current(run_dir)  # a later attempt, not yet in attempts.jsonl, is not abandoned
    return [id for id in ids if id not in kept_ids and id.attempt <= number]


def _is_whole(id: CheckpointId, lacks: Lacks) -> bool:
    """Return whether a checkpoint is complete; False if its store cannot be read."""
    try:
        return not lacks(id)
    except OSError:
        return False
