"""Deduplication and sharding: the stage that chooses the kept documents and plans the shards, over all tasks at once.

The stage reads 37 bytes per document, with near-deduplication 512 bytes more, but no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gangline import UserError
from gangline_dataloader.prepare.near import mark_near_unique
from gangline_dataloader.prepare.prepare_plan import SPLITS, PreparePlan
from gangline_dataloader.prepare.task import Count, Finished, load_finished, make_tag
from gangline_dataloader.store.durable import replace_json
from gangline_dataloader.store.npy import NpyWriter

KEPT, CHOICE = "kept.npy", "choice.json"


@dataclass(frozen=True)
class KeptDocuments:
    """The choice of documents and their shards; documents are numbered over all tasks.

    starts  number of the first document of each task, then the total number of documents
    shards  folder below the store -> [first, end) document of each new shard
    counts  source -> `task.Count` of the documents of the source, as a dict
    """

    starts: list[int]
    shards: dict[str, list[tuple[int, int]]]
    counts: dict[str, dict]

    @property
    def pieces(self) -> list[tuple[str, int]]:
        """The folder of each new shard, and its number among the new shards of that folder."""
        return [(split, number) for split in SPLITS for number in range(len(self.shards[split]))]


def read(plan: PreparePlan) -> KeptDocuments | None:
    """Read the choice of documents; None if they are not chosen yet."""
    try:
        return KeptDocuments(**json.loads((plan.work / CHOICE).read_bytes()))
    except FileNotFoundError:
        return None


def choose(plan: PreparePlan) -> None:
    """Choose the documents to keep, unless they are chosen. Raises UserError if no document is left to train on."""
    if read(plan) is not None:
        return
    tasks = load_tasks(plan)
    rows, known_count = [np.load(one.rows) for one in tasks], len(plan.known)
    starts = np.cumsum([0, *map(len, rows)])
    masks = mark_unique(rows) if plan.settings.exact else [np.ones(len(one), bool) for one in rows]
    masks[:known_count] = [np.ones(len(one), bool) for one in rows[:known_count]]
    duplicate_masks = {"duplicate": [~mask for mask in masks]}
    if plan.settings.near is not None:
        signatures = [np.load(one.signatures, mmap_mode="r") for one in tasks]
        near = mark_near_unique(signatures, masks, plan.settings.near, int(starts[known_count]))
        duplicate_masks["near-duplicate"] = [~mask for mask in near]
        masks = [mask & new for mask, new in zip(masks, near, strict=True)]
    counts = sum_counts(tasks, duplicate_masks)
    kept_mask, held_out = np.concatenate([np.empty(0, bool), *masks]), np.concatenate([one["held_out"] for one in rows])
    kept_mask[: starts[known_count]] = False  # documents of the known shards are in the store already
    lengths = np.concatenate([np.diff(one["end"], prepend=0) for one in rows])
    shards = {
        split: plan_shards(np.where(kept_mask & (held_out == bool(split)), lengths, 0), plan.settings.shard_tokens)
        for split in SPLITS
    }
    if not shards[""] and not known_count:
        raise _explain_empty(counts, int((kept_mask & held_out).sum()), plan.settings.validation)
    tag = make_tag()
    writer = NpyWriter(plan.work / KEPT, "|u1", tag)
    writer.write(kept_mask)
    writer.close()
    selection = KeptDocuments(starts.tolist(), shards, {name: vars(count) for name, count in counts.items()})
    replace_json(plan.work / CHOICE, vars(selection), tag)


def _explain_empty(counts: Mapping[str, Count], held_out: int, validation: float) -> UserError:
    dropped = [
        f"{name}: {number} documents dropped: {why}"
        for name, one in counts.items()
        for why, number in one.dropped.items()
    ]
    if not held_out:
        return UserError("no documents are left for training.", *(dropped or ["The inputs contain no documents."]))
    return UserError(
        "no documents are left for training.",
        f"All {held_out} kept documents are held out for validation (--validation {validation:g}).",
        "A document is held out by the hash of its file name, or by the hash of its text if files hold several rows.",
        *dropped,
        "Add more documents, or set --validation 0.",
    )


def load_tasks(plan: PreparePlan) -> list[Finished]:
    """Load the results of all tasks, each of which must be finished."""
    tasks = [load_finished(plan.work, number) for number in range(len(plan.known) + len(plan.dealt))]
    assert all(tasks), "all tasks must be finished before documents are chosen"
    return [one for one in tasks if one is not None]


def plan_shards(lengths: np.ndarray, shard_tokens: int) -> list[tuple[int, int]]:
    """Plan shards as [first, end) documents from the number of tokens of each document (0: left out).

    A shard ends with the document that brings it to `shard_tokens`.
    """
    ends, shards, first, before = np.cumsum(lengths), [], 0, 0
    total = int(ends[-1]) if len(ends) else 0
    while before < total:
        last = min(int(np.searchsorted(ends, before + shard_tokens)), len(ends) - 1)
        shards.append((first, last + 1))
        first, before = last + 1, int(ends[last])
    return shards


def mark_unique(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Mark exact duplicates: for each task a mask of its documents, false if an earlier document has its hash.

    Documents are in the order of the input. The hash is XXH3-128: among 10^12 different documents, two share a hash
    with a probability of 10^-15.
    """
    hashes = np.concatenate([np.stack([one["high"], one["low"]], 1) for one in rows])
    order = np.lexsort((np.arange(len(hashes)), hashes[:, 1], hashes[:, 0]))
    sorted_hashes = hashes[order]
    new = np.ones(len(hashes), bool)
    new[order[1:]] = (sorted_hashes[1:] != sorted_hashes[:-1]).any(1)
    return np.split(new, np.cumsum([len(one) for one in rows])[:-1])


def sum_counts(tasks: Sequence[Finished], fallen: Mapping[str, Sequence[np.ndarray]]) -> dict[str, Count]:
    """Sum the counts of all tasks by source, and subtract the documents that deduplication drops.

    fallen  reason -> for each task the mask of the documents dropped for it; each document has at most one reason
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
                    whole.nbytes -= int(rows["nbytes"][here].sum())
    return total
