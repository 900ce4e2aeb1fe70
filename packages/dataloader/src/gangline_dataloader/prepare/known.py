"""Tasks for the documents that a store already has, so that appended documents are deduplicated against them."""

from __future__ import annotations

import numpy as np

from gangline_dataloader.prepare.near import compute_signature
from gangline_dataloader.prepare.prepare_plan import PreparePlan
from gangline_dataloader.prepare.task import compute_digest, load_finished, locate_task_files, make_tag, save
from gangline_dataloader.store.durable import replace_json
from gangline_dataloader.store.manifest import name_ends_file, name_loss_file, name_tokens_file
from gangline_dataloader.store.npy import map_vector


def work(plan: PreparePlan, number: int) -> None:
    """Write rows and MinHash signatures of the known shard that is task `number`, unless they exist.

    Signatures are computed from the decoded tokens, which give the original text unless the tokenizer is lossy.
    Raises UserError if a file of the store is damaged.
    """
    if load_finished(plan.work, number):
        return
    split, shard = plan.known[number]
    manifest = plan.read_previous(split)
    assert manifest is not None, "a store with shards has a manifest"
    folder, entry, codec = plan.store / split, manifest.shards[shard], plan.settings.open_codec()
    tokens = np.asarray(
        map_vector(folder / name_tokens_file(shard), manifest.dtype, entry.tokens, entry.xxh3, entry.pieces_xxh3)
    )
    ends = map_vector(folder / name_ends_file(shard), "<u4", entry.documents, entry.ends_xxh3).tolist()
    loss_mask = None
    if entry.loss_xxh3 is not None:
        loss_mask = np.asarray(map_vector(folder / name_loss_file(shard), "|u1", entry.tokens, entry.loss_xxh3))
    near = plan.settings.near is not None
    ends_with = 0 if manifest.tokenizer.end_of_text is None else 1
    rows, alike, start = [], [], 0
    for end in ends:
        digest = compute_digest(tokens[start:end], None if loss_mask is None else loss_mask[start:end])
        rows.append((end, digest >> 64, digest & (1 << 64) - 1, split != "", 0, 0))
        if near:
            alike.append(compute_signature(codec.decode(tokens[start : end - ends_with].tolist())))
        start = end
    tag = make_tag()
    save(plan.work, number, tag, rows, alike if near else None)
    replace_json(locate_task_files(plan.work, number)[-1], {}, tag)
