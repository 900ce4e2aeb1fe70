"""Check that the shards of remote stores that a shuffle needs at once fit into the shard cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gangline import UserError
from gangline_dataloader.sources import windows
from gangline_dataloader.sources.split import SplitRows
from gangline_dataloader.store.remote.tokens import RemoteTokens


def check_room(parts: Sequence[SplitRows], shuffle_span: int | None, cache_bytes: int, sequence_length: int) -> None:
    """Raise UserError if the files that the parts of a run need at once exceed the size limit of the cache.

    Every sample would then wait for a shard that was just evicted.

    parts  parts of all splits of the run, which share the cache
    """
    store_bytes: dict[str, int] = {}
    sources = len({one.name for one in parts})
    for one in parts:
        if isinstance(one.store, RemoteTokens):
            files, reached = count_needed_bytes(one, one.store, shuffle_span, sequence_length, sources)
            store_bytes[one.store.name] = min(files, store_bytes.get(one.store.name, 0) + reached)
    total = sum(store_bytes.values())
    if total > cache_bytes:
        reach = "the complete corpus" if shuffle_span is None else f"data.shuffle_span={shuffle_span} tokens"
        raise UserError(
            f"data.cache_bytes={cache_bytes} is too small for the shuffle window.",
            f"The shards of the shuffle window ({reach}) and of the prefetched windows have {total} bytes.",
            f"data.cache_bytes={total}, or a smaller data.shuffle_span, which changes the order of the samples.",
        )


def count_needed_bytes(
    one: SplitRows, store: RemoteTokens, shuffle_span: int | None, sequence_length: int, sources: int
) -> tuple[int, int]:
    """Count (bytes of all files of a store, bytes of the files that are needed at once)."""
    nbytes = (
        store.compute_shard_bytes()
        if one.plan is None
        else store.compute_shard_bytes() + one.plan.compute_shard_bytes()
    )
    whole = int(nbytes.sum())
    if shuffle_span is None:
        return whole, whole
    rows = max(1, shuffle_span // sequence_length)
    # number of samples ahead that `WindowSource.locate_samples` announces
    ahead = max(windows.AHEAD, sources * rows) + windows.AHEAD
    spans = 1 + -(-ahead // rows)
    reach = one.compute_reach(rows)
    if one.plan is None:
        lengths, stretch = store.manifest.shards.tokens, reach * sequence_length + 1
    else:
        lengths, stretch = one.plan.plan.shards.rows, reach
    return whole, min(whole, spans * compute_max_bytes(np.cumsum(lengths, dtype=np.int64), nbytes, stretch))


def compute_max_bytes(ends: np.ndarray, nbytes: np.ndarray, stretch: int) -> int:
    """Compute the maximum total bytes of the shards that hold `stretch` adjacent items, over all first items.

    ends    (S,) int64, ascending: shard k ends before item number ends[k]
    nbytes  (S,) int64: bytes of each shard
    """
    up_to = np.concatenate([[0], np.cumsum(nbytes)])
    stop = np.minimum(ends - 1 + stretch, ends[-1])  # end of a stretch from each shard's last item on
    return int((up_to[np.searchsorted(ends, stop) + 1] - up_to[:-1]).max())
