"""The documents that a store has already, as a task's, so that what is put behind them can be held against them."""

from __future__ import annotations

import numpy as np

from gangline_dataloader.prepare.near import signature
from gangline_dataloader.prepare.prepare_plan import PreparePlan
from gangline_dataloader.prepare.task import digest_of, load_finished, paths, save, tag
from gangline_dataloader.store.durable import replace_json
from gangline_dataloader.store.manifest import ends_of, file_of, loss_of
from gangline_dataloader.store.npy import map_vector


def work(plan: PreparePlan, number: int) -> None:
    """Rows and signatures of the known shard that is task `number`, unless they are there.

    Signatures are of the text that the tokens say, which is what was tokenised but for vocabularies that lose some.
    Raises UserError where a file of the store is damaged.
    """
    if load_finished(plan.work, number):
        return
    split, shard = plan.known[number]
    manifest = plan.read_previous(split)
    assert manifest is not None, "there are shards where there is a manifest"
    folder, entry, codec = plan.store / split, manifest.shards[shard], plan.settings.codec()
    tokens = np.asarray(
        map_vector(folder / file_of(shard), manifest.dtype, entry.tokens, entry.xxh3, entry.pieces_xxh3)
    )
    ends = map_vector(folder / ends_of(shard), "<u4", entry.documents, entry.ends_xxh3).tolist()
    counted = None
    if entry.loss_xxh3 is not None:
        counted = np.asarray(map_vector(folder / loss_of(shard), "|u1", entry.tokens, entry.loss_xxh3))
    near = plan.settings.near is not None
    ends_with = 0 if manifest.tokenizer.end_of_text is None else 1
    found, alike, start = [], [], 0
    for end in ends:
        digest = digest_of(tokens[start:end], None if counted is None else counted[start:end])
        found.append((end, digest >> 64, digest & (1 << 64) - 1, split != "", 0, 0))
        if near:
            alike.append(signature(codec.decode(tokens[start : end - ends_with].tolist())))
        start = end
    mine = tag()
    save(plan.work, number, mine, found, alike if near else None)
    replace_json(paths(plan.work, number)[-1], {}, mine)
