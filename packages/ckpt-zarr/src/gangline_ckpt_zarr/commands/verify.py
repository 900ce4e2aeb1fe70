"""`gangline ckpt verify`: read every byte that is data, and name what is not what was written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gangline.errors import BadCheckpoint, UserError
from gangline_ckpt_zarr.commands import text
from gangline_ckpt_zarr.commands.scan import Bad, Check, merged
from gangline_ckpt_zarr.commands.where import PLACES, Copy, Place, one, parser
from gangline_ckpt_zarr.format.metadata import Meta
from gangline_ckpt_zarr.scanning import windows
from gangline_ckpt_zarr.stores.base import Store


def run(argv: Sequence[str]) -> int:
    """Check copies of checkpoints; 1 where anything is damaged."""
    words = parser("verify", "Read every byte of a checkpoint and name every bad chunk.")
    words.add_argument("place", metavar="CHECKPOINT", nargs="+", help=PLACES)
    words.add_argument("--all", action="store_true", help="all copies; of a run, those of every whole checkpoint")
    options = words.parse_args(list(argv))
    place = one(options.place).only(options.tier)
    if options.all and options.tier is None:  # what a machine has in its memory is not the whole of a large run
        place = replace(place, tiers=tuple(tier for tier in place.tiers if tier.name != "memory"))
    copies = _every(place) if options.all else [place.copy()]
    bad = nbytes = 0
    start = time.perf_counter()
    for copy in copies:
        found, read = _one(copy)
        bad, nbytes = bad + found, nbytes + read
    seconds = time.perf_counter() - start
    counted = "1 copy" if len(copies) == 1 else f"{len(copies):,} copies"
    state = f"{bad} damaged" if bad else "all good"
    print(f"{counted}: {state}; {text.size(nbytes)} in {seconds:.1f} s, {text.size(nbytes / seconds)}/s")
    return 1 if bad else 0


def _every(place: Place) -> list[Copy]:
    if place.alone is not None or place.id is not None:
        return place.copies()
    found = [copy for id in place.ids() for copy in replace(place, id=id).copies()]
    if not found:
        raise UserError(f"{place.text} has no whole checkpoint.")
    return found


def _one(copy: Copy) -> tuple[int, int]:
    """(1 if a copy is damaged, bytes read); prints what is bad in it."""
    try:
        files = [copy.meta.files.of_rank(rank) for rank in range(copy.meta.registry.mesh.world)]
    except BadCheckpoint as bad:
        print(bad)
        return 1, 0
    total = sum(file.size for file in files)
    with text.progress(f"{copy.name} {copy.tier}", total) as advance:
        damage = [line for rank in range(len(files)) for line in damaged(copy.store, copy.meta, rank, advance)]
    for line in damage:
        print(line)
    count = sum(run.count for file in files for run in file.runs)
    state = text.many(len(damage), "bad chunk") if damage else "good"
    print(f"{text.place(copy.store.url)}: {state} ({text.many(count, 'chunk')}, {text.size(total)})")
    return bool(damage), total


def damaged(store: Store, meta: Meta, rank: int, advance: Callable[[int], None]) -> list[BadCheckpoint]:
    """What is bad in the file of a rank."""
    file = meta.files.of_rank(rank)
    if not file.runs:
        return []
    check, path = Check(file, meta), meta.path(rank)
    found: list[Bad] = []
    for window in windows(store, path, file.size):
        found += check.feed(window)
        advance(window.size)
    return [BadCheckpoint(bad.run.name, bad.box, f"{store.url}/{path}", bad.why) for bad in merged(found)]
