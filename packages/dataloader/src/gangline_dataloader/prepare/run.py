"""The whole of `gangline data prepare`: a plan, its tasks on all cores, the store, the manifest last."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from gangline import UserError
from gangline.launch import die_with
from gangline_dataloader.prepare.assemble import counted, first_of_each, write_shards
from gangline_dataloader.prepare.inputs import Input, listing, tasks
from gangline_dataloader.prepare.near import first_of_near
from gangline_dataloader.prepare.settings import BYTES, TIKTOKEN, Settings, copy_tokenizer, dtype_for
from gangline_dataloader.prepare.task import Finished, finished, work
from gangline_dataloader.store import manifest as manifests
from gangline_dataloader.store.manifest import FILE, Manifest, Shards, Tokenizer, read

WORK = ".prepare"  # the folder of what is under way
VALIDATION = "validation"  # the folder of what is held out, a store of its own

Progress = Callable[[int, int], None]  # (tasks done, tasks in all)


def prepare(
    words: Sequence[str], out: str | Path, settings: Settings, workers: int, progress: Progress, engine: str = TIKTOKEN
) -> Manifest:
    """Make a store of what `words` name; go on where an interrupted call left off. Gives the manifest.

    engine  what encodes, one of settings.ENGINES; the tokens are the same

    Raises UserError where an input cannot be read, nothing is left to train on, or `out` holds something else.
    """
    settings.check()
    files, folder = listing(words, out), Path(out).expanduser()
    identity = settings.identity(files)
    if whole := already(folder, identity):
        return whole
    begin(folder, identity)
    dealt = tasks(files, settings.task_bytes)
    done = run_tasks(folder / WORK, dealt, settings, workers, progress, engine)
    manifest = assemble(folder, done, files, settings, identity)
    shutil.rmtree(folder / WORK)
    return manifest


def already(folder: Path, identity: str) -> Manifest | None:
    """The manifest where the same call has been carried out. Raises UserError where something else lies there."""
    if not folder.exists():
        return None
    if (folder / FILE).exists():
        found = read(folder)
        if found.report.get("identity") == identity:
            return found
        raise UserError(
            f"{folder} holds another token store.",
            f"It was made of {', '.join(found.sources) or 'something else'}.",
            "Other inputs or options make another store, and so do inputs that have changed.",
            "Name another --out, or delete it.",
        )
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / WORK).is_dir()):
        raise UserError(
            f"{folder} holds something else.", "A store is made in a directory of its own.", "Name another --out."
        )
    return None


def begin(folder: Path, identity: str) -> None:
    """The folder of what is under way, emptied where it is of another call."""
    work_folder, plan = folder / WORK, folder / WORK / "plan.json"
    try:
        same = json.loads(plan.read_text())["identity"] == identity
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if work_folder.exists() and not same:
        shutil.rmtree(work_folder)
    work_folder.mkdir(parents=True, exist_ok=True)
    plan.write_text(json.dumps({"identity": identity}))


def run_tasks(
    folder: Path, dealt: Sequence[Sequence[Input]], settings: Settings, workers: int, progress: Progress, engine: str
) -> list[Finished]:
    """Every task, on `workers` processes. What they raise is raised, the others' work kept."""
    known = {number: done for number in range(len(dealt)) if (done := finished(folder, number))}
    progress(len(known), len(dealt))
    left = [number for number in range(len(dealt)) if number not in known]
    if workers <= 1 or len(left) <= 1:
        for number in left:
            known[number] = work(folder, number, dealt[number], settings, engine)
            progress(len(known), len(dealt))
        return [known[number] for number in range(len(dealt))]
    with ProcessPoolExecutor(
        min(workers, len(left)), get_context("spawn"), initializer=die_with, initargs=(os.getpid(),)
    ) as pool:
        waiting = {pool.submit(work, folder, number, dealt[number], settings, engine): number for number in left}
        try:
            for future in as_completed(waiting):
                known[waiting[future]] = future.result()
                progress(len(known), len(dealt))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [known[number] for number in range(len(dealt))]


def assemble(
    folder: Path, done: Sequence[Finished], files: Sequence[Input], settings: Settings, identity: str
) -> Manifest:
    """The shards of both splits, then their manifests, that of the whole last."""
    codec = settings.codec()
    dtype = dtype_for(codec.vocab_size)
    rows = [np.load(one.rows) for one in done]
    masks = first_of_each(done) if settings.exact else [np.ones(len(one), bool) for one in rows]
    fallen = {"double": [~mask for mask in masks]}
    if settings.near is not None:
        signatures = [np.load(one.signatures, mmap_mode="r") for one in done]
        near = first_of_near(signatures, masks, settings.near)
        fallen["near double"] = [~mask for mask in near]
        masks = [mask & new for mask, new in zip(masks, near, strict=True)]
    counts = counted(done, fallen)
    report = {
        "identity": identity,
        "settings": asdict(settings),
        "by_source": {k: asdict(v) for k, v in counts.items()},
    }
    kind = BYTES if settings.tokenizer == BYTES else "tokenizer.json"
    tokenizer = Tokenizer(kind, codec.identity, copy_tokenizer(settings, folder), codec.separator)
    sources = {word: {"files": sum(file.source == word for file in files)} for word in counts}

    def described(shards: Shards) -> Manifest:
        return Manifest(dtype, codec.vocab_size, tokenizer, shards, sources, report)

    held_out = folder / VALIDATION
    shutil.rmtree(held_out, ignore_errors=True)
    held_out.mkdir()
    validation = write_shards(held_out, done, masks, settings, dtype, held_out=True)
    train = write_shards(folder, done, masks, settings, dtype, held_out=False)
    if not len(train):
        raise UserError("nothing is left to train on.", *(f"{name}: {count.dropped}" for name, count in counts.items()))
    if len(validation):
        copy_tokenizer(settings, held_out)
        described(validation).write(held_out)
    else:
        held_out.rmdir()
    manifest = described(train)
    manifest.write(folder)
    return manifests.read(folder)
