"""From finished tasks to shards: doubles are dropped, the rest is written in the order of the input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from gangline_dataloader.prepare.settings import Settings
from gangline_dataloader.prepare.task import Count, Finished, counted_of
from gangline_dataloader.store.manifest import Shards
from gangline_dataloader.store.write import ShardWriter


def first_of_each(tasks: Sequence[Finished]) -> list[np.ndarray]:
    """For each task a mask of its documents: true where no document before, in the order of the input, has its text.

    Texts are compared by XXH3-128: among 10^12 different ones two agree with a probability of 10^-15.
    """
    rows = [np.load(task.rows) for task in tasks]
    hashes = np.concatenate([np.stack([one["high"], one["low"]], 1) for one in rows])
    order = np.lexsort((np.arange(len(hashes)), hashes[:, 1], hashes[:, 0]))
    ordered = hashes[order]
    new = np.ones(len(hashes), bool)
    new[order[1:]] = (ordered[1:] != ordered[:-1]).any(1)
    return np.split(new, np.cumsum([len(one) for one in rows])[:-1])


def write_shards(
    folder: Path, tasks: Sequence[Finished], masks: Sequence[np.ndarray], settings: Settings, dtype: str, held_out: bool
) -> Shards:
    """The shards of one split. A shard is closed with the document that fills it."""
    shards, writer = Shards(), None
    for documents in _kept(tasks, masks, held_out):
        for document, counted in documents:
            if writer is None:
                writer = ShardWriter(folder, len(shards), dtype, settings.chat)
            writer.write([document], [counted])
            if writer.tokens >= settings.shard_tokens:
                shards.append(writer.close())
                writer = None
    if writer is not None:
        shards.append(writer.close())
    return shards


def _kept(
    tasks: Sequence[Finished], masks: Sequence[np.ndarray], held_out: bool
) -> Iterator[list[tuple[np.ndarray, np.ndarray | None]]]:
    for task, mask in zip(tasks, masks, strict=True):
        rows = np.load(task.rows)
        if not len(rows):
            continue
        tokens = np.load(task.tokens, mmap_mode="r")
        counted = np.load(counted_of(task.tokens), mmap_mode="r") if counted_of(task.tokens).exists() else None
        starts = np.concatenate([[0], rows["end"][:-1]])
        here = np.flatnonzero(mask & (rows["held_out"] == held_out))
        cuts = [slice(starts[i], rows["end"][i]) for i in here]
        yield [(tokens[cut], None if counted is None else counted[cut]) for cut in cuts]


def counted(tasks: Sequence[Finished], fallen: Mapping[str, Sequence[np.ndarray]]) -> dict[str, Count]:
    """What became of all documents, by source.

    fallen  why documents are dropped after their task -> for each task the mask of those; no document falls twice
    """
    total: dict[str, Count] = {}
    for number, task in enumerate(tasks):
        rows = np.load(task.rows)
        lengths = np.diff(rows["end"], prepend=0)
        for index, (source, count) in enumerate(task.counts.items()):
            whole = total.setdefault(source, Count())
            whole.add(count)
            for why, masks in fallen.items():
                here = masks[number] & (rows["source"] == index)
                if here.any():
                    whole.drop(why, int(here.sum()))
                    whole.kept -= int(here.sum())
                    whole.tokens -= int(lengths[here].sum())
    return total
