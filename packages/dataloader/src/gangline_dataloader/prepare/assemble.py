"""Assembly of a token store: kept documents become shards, in the order of the input, and shards become a store."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gangline_basics.data.chat_tokens import LOSS_MASK_RULE
from gangline_dataloader.prepare import choice
from gangline_dataloader.prepare.prepare_plan import PreparePlan
from gangline_dataloader.prepare.settings import RULES_VERSION, choose_dtype, copy_tokenizer
from gangline_dataloader.prepare.task import Count, locate_counted, locate_task_files, make_tag
from gangline_dataloader.store.durable import replace_json
from gangline_dataloader.store.manifest import (
    VALIDATION,
    Manifest,
    ShardEntry,
    Shards,
    Tokenizer,
    name_ends_file,
    name_loss_file,
    name_tokens_file,
)
from gangline_dataloader.store.npy import HEADER
from gangline_dataloader.store.write import ShardWriter

SHARDS = "shards"  # folder of the new shards, in the plan's working folder
_NUMBER = re.compile(r"shard-(\d+)\.")


def write_shard(plan: PreparePlan, number: int) -> None:
    """Write new shard `number`, counted over the shards of both splits, unless it exists."""
    selection = choice.read(plan)
    assert selection is not None, "documents are chosen before shards are written"
    split, new = selection.pieces[number]
    folder, shard = plan.work / SHARDS / split, plan.base.shards[split] + new
    if _locate_note(folder, shard).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    dtype = choose_dtype(plan.settings.open_codec().vocab_size)
    tag = make_tag()
    writer = ShardWriter(folder, shard, dtype, plan.settings.chat, tag)
    for run in _iterate_runs(plan, selection, *selection.shards[split][new], held_out=bool(split)):
        writer.write_run(*run)
    replace_json(_locate_note(folder, shard), asdict(writer.close()), tag)


def _iterate_runs(
    plan: PreparePlan, chosen: choice.KeptDocuments, first: int, last: int, held_out: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Yield (tokens, document lengths, loss mask or None) for each range of adjacent kept documents of a split."""
    kept_mask = np.memmap(plan.work / choice.KEPT, np.uint8, "r", HEADER)
    dtype = np.dtype(choose_dtype(plan.settings.open_codec().vocab_size))
    task = int(np.searchsorted(chosen.starts, first, side="right")) - 1
    while task + 1 < len(chosen.starts) and chosen.starts[task] < last:
        begin, end = chosen.starts[task], chosen.starts[task + 1]
        start, stop = max(first, begin), min(last, end)
        here = locate_task_files(plan.work, task)
        task += 1
        if start >= stop:
            continue
        rows = np.load(here[1])
        ends = np.concatenate([[0], rows["end"]])
        chosen_here = (kept_mask[start:stop] == 1) & (rows["held_out"][start - begin : stop - begin] == held_out)
        if not chosen_here.any():
            continue
        tokens = np.memmap(here[0], dtype, "r", HEADER)
        loss_mask = np.memmap(locate_counted(here[0]), np.uint8, "r", HEADER) if plan.settings.chat else None
        edges = np.flatnonzero(np.diff(chosen_here, prepend=False, append=False)) + start - begin
        for one, other in edges.reshape(-1, 2).tolist():
            cut = slice(int(ends[one]), int(ends[other]))
            yield tokens[cut], np.diff(ends[one : other + 1]), None if loss_mask is None else loss_mask[cut]


def publish(plan: PreparePlan) -> None:
    """Move the new shards into the store and write the manifests: first the validation part's, then the store's own.

    A call after a killed call continues its work. An existing store is unchanged until its manifest is replaced, and
    keeps all its old shards as its first shards. The manifest has the identity of the validation part, so both grow
    together.
    """
    selection = choice.read(plan)
    assert selection is not None, "documents are chosen before a store is made of them"
    settings, codec = plan.settings, plan.settings.open_codec()
    sources, report = _count_source_files(plan, selection), _make_report(plan, selection)
    validation: str | None = None
    for split in (VALIDATION, ""):
        folder, before, was = plan.store / split, plan.base.shards[split], plan.read_previous(split)
        if not (after := before + len(selection.shards[split])):
            continue
        shards = Shards() if was is None else was.shards
        for number in range(before, after):
            shards.append(ShardEntry(**json.loads(_locate_note(plan.work / SHARDS / split, number).read_bytes())))
        dtype, size = choose_dtype(codec.vocab_size), codec.vocab_size
        if split and not before:
            about = Tokenizer("", codec.identity, None, codec.separator)
            plan.claim_validation(Manifest(dtype, size, about, shards).compute_identity())
        folder.mkdir(exist_ok=True)
        for number in range(before, after):
            for name in (name_tokens_file(number), name_ends_file(number), name_loss_file(number)):
                if (waiting := plan.work / SHARDS / split / name).exists():
                    waiting.replace(folder / name)
        _drop_from(folder, after)
        tokenizer, rule = copy_tokenizer(settings, folder), LOSS_MASK_RULE if settings.chat else None
        held_out = not split and bool(plan.base.shards[VALIDATION] or selection.shards[VALIDATION])
        manifest = Manifest(dtype, size, tokenizer, shards, sources, report, rule, held_out, validation)
        manifest.write(folder)
        validation = manifest.compute_identity()
    shutil.rmtree(plan.work)


def _count_source_files(plan: PreparePlan, chosen: choice.KeptDocuments) -> dict[str, Any]:
    """Return {source: {"files": number of files}} over all calls that wrote the store."""
    total = Counter({name: one["files"] for name, one in _read_known(plan, "sources").items()})
    total.update(file.source for file in plan.files)
    return {name: {"files": total[name]} for name in (*_read_known(plan, "sources"), *chosen.counts) if name in total}


def _make_report(plan: PreparePlan, chosen: choice.KeptDocuments) -> dict[str, Any]:
    """Return the report of the store: counts by source over all calls, and settings of the first and later calls."""
    old_manifest, counts = plan.read_previous(""), {name: Count(**one) for name, one in chosen.counts.items()}
    here = {"identity": plan.identity, "settings": asdict(plan.settings), "rules": RULES_VERSION}
    if old_manifest is None:
        return {**here, "by_source": {name: vars(count) for name, count in counts.items()}}
    whole = {name: Count(**one) for name, one in old_manifest.report.get("by_source", {}).items()}
    for name, count in counts.items():
        whole.setdefault(name, Count()).add(count)
    appended = [*old_manifest.report.get("appended", []), {**here, "first_shard": plan.base.shards[""]}]
    by_source = {name: vars(count) for name, count in whole.items()}
    return {**old_manifest.report, "by_source": by_source, "appended": appended}


def _read_known(plan: PreparePlan, what: str) -> dict[str, Any]:
    old_manifest = plan.read_previous("")
    return {} if old_manifest is None else dict(getattr(old_manifest, what))


def _locate_note(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.json"


def _drop_from(folder: Path, count: int) -> None:
    """Remove the shards from number `count` on, which a killed call left and which are not in the manifest."""
    for path in folder.glob("shard-*"):
        if (match := _NUMBER.match(path.name)) and int(match[1]) >= count:
            path.unlink()
