"""`gangline ckpt verify`: read every byte that is data, and report every bad chunk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from gangline import BadCheckpoint, UserError
from gangline_ckpt_zarr.commands import text
from gangline_ckpt_zarr.commands.bad_chunks import BadChunks, FileScanner, merge_runs
from gangline_ckpt_zarr.commands.where import PLACES, Copy, Place, find_place, make_parser
from gangline_ckpt_zarr.errors import describe_error
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.chunks import RankFile
from gangline_ckpt_zarr.format.native import NativeMeta, encode_nodes, index, index_bytes
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.format.references import AT, REFERENCES, build_references
from gangline_ckpt_zarr.load.scan import read_windows
from gangline_ckpt_zarr.stores.base import ObjectStore

MOST_LOST = 100  # maximum number of missing files that are reported


def run(argv: Sequence[str]) -> int:
    """Check copies of checkpoints; return 1 if anything is damaged. Raises UserError."""
    words = make_parser("verify", "Read every byte of a checkpoint and report every bad chunk.")
    words.add_argument("place", metavar="CHECKPOINT", nargs="+", help=PLACES)
    words.add_argument(
        "--all", action="store_true", help="all copies of the checkpoint; for a run, of every complete checkpoint"
    )
    options = words.parse_args(list(argv))
    place = find_place(options.place).select_tier(options.tier)
    if options.all and options.tier is None:  # one machine's memory has only some files of a large run
        place = replace(place, tiers=tuple(tier for tier in place.tiers if tier.name != "memory"))
    copies = _list_copies(place) if options.all else [place.copy()]
    bad = nbytes = 0
    start = time.perf_counter()
    for copy in copies:
        bad_copies, read = _verify_copy(copy)
        bad, nbytes = bad + bad_copies, nbytes + read
    seconds = time.perf_counter() - start
    copy_count = "1 copy" if len(copies) == 1 else f"{len(copies):,} copies"
    state = f"{bad} damaged" if bad else "all good"
    print(f"{copy_count}: {state}; {text.size(nbytes)} in {seconds:.1f} s, {text.size(nbytes / seconds)}/s")
    return 1 if bad else 0


def _list_copies(place: Place) -> list[Copy]:
    if place.alone is not None or place.id is not None:
        return place.list_copies()
    copies = [copy for id in place.list_ids() for copy in replace(place, id=id).list_copies()]
    if not copies:
        raise UserError(f"no complete checkpoint found in {place.text}.")
    return copies


def _verify_copy(copy: Copy) -> tuple[int, int]:
    """Print the damage of a copy; return (1 if it is damaged, bytes read)."""
    damage, chunks, nbytes = check_copy(copy)
    for line in damage:
        print(line)
    if chunks:
        state = text.format_count(len(damage), "bad chunk") if damage else "good"
        print(f"{text.place(copy.store.url)}: {state} ({text.format_count(chunks, 'chunk')}, {text.size(nbytes)})")
    return bool(damage), nbytes


def check_copy(copy: Copy) -> tuple[list[BadCheckpoint], int, int]:
    """Return (damage of a copy, number of chunks, number of bytes read), after reading every byte that is data."""
    try:
        meta, sizes = copy.meta, copy.store.list_sizes()
    except BadCheckpoint as bad:
        return [bad], 0, 0
    there: list[int] = []
    missing_ranks: list[int] = []
    for rank in meta.iterate_writers():
        (there if meta.get_file_path(rank) in sizes else missing_ranks).append(rank)
        if len(missing_ranks) == MOST_LOST:  # a damaged zarr.json may claim any number of ranks
            break
    chunks = sum(run.count for rank in there + missing_ranks for run in meta.files.get_rank_file(rank).runs)
    total = sum(meta.files.get_rank_file(rank).size for rank in there)
    with text.show_progress(f"{copy.name} {copy.tier}", total) as advance:
        damage = [
            line for rank in sorted(there + missing_ranks) for line in find_damage(copy.store, meta, rank, advance)
        ]
    return [*_check_metadata(copy, meta), *damage], chunks, total


def _check_metadata(copy: Copy, meta: Meta) -> Iterator[BadCheckpoint]:
    """Yield damage in metadata for other readers: zarr.json of each array and group if native, or refs.json."""
    if isinstance(meta, NativeMeta):
        for name, content in encode_nodes(copy.content).items():
            yield from _check_node_file(copy.store, f"{name}/{NAME}", name, content)
    elif copy.store.exists(REFERENCES):
        why = ""
        try:
            references = json.loads(copy.store.read(REFERENCES))
            if references["refs"] != build_references(copy.content, meta, AT)["refs"]:
                why = "the references do not match zarr.json"
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = str(error)
        if why:
            yield BadCheckpoint("every array", None, f"{copy.store.url}/{REFERENCES}", why)


def _check_node_file(store: ObjectStore, path: str, name: str, content: bytes) -> Iterator[BadCheckpoint]:
    try:
        why = "" if store.read(path) == content else "the content does not match the root's zarr.json"
    except OSError as error:
        why = describe_error(error)
    if why:
        yield BadCheckpoint(name, None, f"{store.url}/{path}", why)


def _check_index(store: ObjectStore, path: str, file: RankFile) -> Iterator[BadCheckpoint]:
    """Yield damage in the index of a shard, from which zarr reads the offsets of the shard's chunks."""
    (run,) = file.runs
    content = memoryview(bytearray(index_bytes(run)))
    store.read_into(path, [(run.end, [content])])
    if content != index(run):
        yield BadCheckpoint(
            run.name, None, f"{store.url}/{path}", "the index of the shard does not match the offsets of its chunks"
        )


def find_damage(store: ObjectStore, meta: Meta, rank: int, advance: Callable[[int], None]) -> list[BadCheckpoint]:
    """Return the damage in the file of a rank."""
    file, path = meta.files.get_rank_file(rank), meta.get_file_path(rank)
    try:
        there = store.size(path)
        why = f"the file {wrong}" if (wrong := file.find_size_error(there)) else ""
    except FileNotFoundError:
        there, why = 0, "the file is missing"
    check = FileScanner(file, meta, there)
    bad_chunks: list[BadChunks] = []
    for window in read_windows(store, path, min(there, file.size)):
        bad_chunks += check.feed(window)
        advance(window.size)
    missing_chunks = list(check.find_missing(why))
    lines = [
        BadCheckpoint(bad.run.name, bad.box, f"{store.url}/{path}", bad.why)
        for bad in merge_runs(bad_chunks + missing_chunks)
    ]
    if (
        why and not missing_chunks
    ):  # every chunk exists: bytes of the padding or the index are missing, or the file is too long
        lines.append(BadCheckpoint("every array", None, f"{store.url}/{path}", why))
    if isinstance(meta, NativeMeta) and not why and file.runs[0].count > 1:
        lines += _check_index(store, path, file)
    return lines
