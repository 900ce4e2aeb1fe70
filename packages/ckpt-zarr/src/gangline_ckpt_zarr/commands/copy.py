"""`gangline ckpt copy`: copy a checkpoint to another store; each chunk is checked when read and at the target."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from gangline import BadCheckpoint, UserError
from gangline.checkpoint.id import CheckpointId
from gangline_ckpt_zarr.commands import text
from gangline_ckpt_zarr.commands.bad_chunks import FileScanner
from gangline_ckpt_zarr.commands.blocks import Blocks
from gangline_ckpt_zarr.commands.verify import find_damage
from gangline_ckpt_zarr.commands.where import PLACES, Copy, find_place, make_parser, open_tiers
from gangline_ckpt_zarr.format import claims, native, overlap
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.checksum import CHECKSUM, checksum_of, read_checksum
from gangline_ckpt_zarr.format.chunks import ChunkRun
from gangline_ckpt_zarr.format.native import NativeMeta
from gangline_ckpt_zarr.format.nodes import NAME
from gangline_ckpt_zarr.load.scan import read_windows
from gangline_ckpt_zarr.stores.base import ObjectStore
from gangline_ckpt_zarr.stores.open import open_store

Advance = Callable[[int], None]
AT_ONCE = 8  # number of chunk files that are written in parallel: each write waits for the store


def run(argv: Sequence[str]) -> int:
    """Copy one checkpoint; the copy becomes visible when it is complete. Raises UserError, BadCheckpoint."""
    words = make_parser("copy", "Copy a checkpoint to another store. An existing checkpoint is never overwritten.")
    words.add_argument("place", metavar="CHECKPOINT", nargs="+", help=PLACES)
    words.add_argument(
        "to",
        metavar="TO",
        help="directory or URL: the copy itself, or its parent if TO ends with / or is an existing directory",
    )
    words.add_argument("--open", action="store_true", help="write native zarr, which any zarr reader opens by its path")
    options = words.parse_args(list(argv))
    source = find_place(options.place).select_tier(options.tier).copy()
    meta = source.check_sizes()  # a damaged source is refused before anything is written
    url = _choose_target(options.to, source.name)
    _refuse(source, url)
    store = open_store(url)
    if store.exists(NAME):
        raise UserError(
            f"{url} already contains a checkpoint, and copies never overwrite.", "Name another destination."
        )
    write = _copy_by_chunk if options.open or isinstance(meta, NativeMeta) else _as_it_is
    with ExitStack() as stack:
        try:
            stack.enter_context(store.lock())
        except BlockingIOError:
            raise UserError(
                f"another process is copying to {url}.", "Wait for that process, or name another destination."
            ) from None
        write(source, store)
    print(f"{url}: copy of {text.place(source.store.url)}")
    return 0


def _refuse(source: Copy, url: str) -> None:
    """Raise UserError if the copy would be inside a checkpoint, or named by the id of another checkpoint."""
    here, there = (text.resolve_path(place) for place in (source.store.url, url))
    above = os.path.dirname(there)
    if there != here and (f"{there}/".startswith(f"{here}/") or os.path.exists(f"{above}/{NAME}")):
        where = "that checkpoint" if f"{there}/".startswith(f"{here}/") else above
        raise UserError(
            f"the copy of {source.store.url} would be inside {where}.",
            f"Destination:  {url}",
            "Name another destination.",
        )
    id, name = CheckpointId(*claims.parse_identity(source.meta.document)), there.rpartition("/")[2]
    if CheckpointId.parse(name) not in (id, None):
        raise UserError(
            f"a copy of checkpoint {id} cannot have the name {name}.",
            "A directory with a checkpoint id as its name must contain the checkpoint of this id.",
            f"gangline ckpt copy ... {there.rpartition('/')[0]}/",
        )


def _choose_target(word: str, name: str) -> str:
    """Return the URL of the copy of checkpoint `name`, for the destination `word` of the command line.

    If `word` is a run directory, the copy is `name` in the run's disk tier. If `word` ends with "/" or is a directory
    that is not a checkpoint, the copy is `name` in `word`. Otherwise the copy is `word` itself.
    """
    path = word.rstrip("/")
    if os.path.exists(f"{path}/config.yaml"):
        return f"{next(tier for tier in open_tiers(path) if tier.name == 'disk').store.url}/{name}"
    itself = CheckpointId.parse(path.rpartition("/")[2]) is not None or os.path.exists(f"{path}/{NAME}")
    inside = word.endswith("/") or (os.path.isdir(path) and not itself)
    return f"{path}/{name}" if inside else path


def _as_it_is(source: Copy, store: ObjectStore) -> None:
    """Copy the files byte for byte, and zarr.json last."""
    meta = source.meta
    ranks = sorted(meta.iterate_writers())
    folder = os.path.dirname(meta.get_file_path(0))
    store.delete(folder)  # remains of an interrupted copy
    total = sum(meta.files.get_rank_file(rank).size for rank in ranks)
    try:
        with text.show_progress(f"copy {source.name}", 2 * total) as advance:
            for rank in ranks:
                _copy_file(source, store, rank, advance)
            _verify_written(store, meta, ranks, advance)
        store.commit(NAME, source.content)
    except BaseException:
        store.delete(folder)
        raise


def _copy_file(source: Copy, store: ObjectStore, rank: int, advance: Advance) -> None:
    meta = source.meta
    file, path = meta.files.get_rank_file(rank), meta.get_file_path(rank)
    writer, check = store.create(path, file.size), FileScanner(file, meta, file.size)
    try:
        for window in read_windows(source.store, path, file.size):
            for bad in check.feed(window):
                raise BadCheckpoint(bad.run.name, bad.box, f"{source.store.url}/{path}", bad.why)
            if window.content is None:
                raise BadCheckpoint("every array", None, f"{source.store.url}/{path}", window.why)
            writer.write(window.content)
            advance(window.size)
        writer.close()
    except BaseException:
        writer.abort()
        raise


def _verify_written(store: ObjectStore, meta: Meta, ranks: Sequence[int], advance: Advance) -> None:
    """Raise BadCheckpoint if the content read back is not what was written."""
    for rank in ranks:
        for bad in find_damage(store, meta, rank, advance):
            raise bad


def _copy_by_chunk(source: Copy, store: ObjectStore) -> None:
    """Write a file for each chunk or shard, zarr.json for each array and group, and the root's zarr.json last."""
    if store.names():
        raise UserError(f"the destination {store.url} is not empty.", "Name a directory that does not exist.")
    meta = native.as_native(source.meta)
    ranks = sorted(meta.iterate_writers())
    total = sum(meta.files.get_rank_file(rank).size for rank in ranks)
    try:
        with (
            text.show_progress(f"copy {source.name}", 2 * total) as advance,
            ThreadPoolExecutor(AT_ONCE, thread_name_prefix="copy") as pool,
        ):
            for size in pool.map(lambda rank: _write_chunks(source, store, meta, rank), ranks):
                advance(size)
            _verify_written(store, meta, ranks, advance)
            content = native.write(meta)
            put = [
                pool.submit(store.commit, f"{name}/{NAME}", node) for name, node in native.encode_nodes(content).items()
            ]
            for future in put:
                future.result()
        store.commit(NAME, content)
    except BaseException:
        store.delete("")
        raise


def _write_chunks(source: Copy, store: ObjectStore, meta: NativeMeta, rank: int) -> int:
    """Write the file of a chunk or shard, and record the checksums in `meta`; return the file's size."""
    file = meta.files.get_rank_file(rank)
    (run,) = file.runs
    layout = meta.registry[run.name]
    with Blocks(store, meta.get_file_path(rank), file.size) as blocks:
        for number in range(run.count):
            blocks.pad(run.base + number * run.stride)
            chunk = _chunk(source, run, number)
            blocks.put(chunk)
            meta.sums[run.name][native.place(run, number, layout)] = read_checksum(chunk[run.nbytes :])
        if run.count > 1:
            blocks.pad(run.end)
            blocks.put(native.index(run))
    return file.size


def _chunk(source: Copy, run: ChunkRun, number: int) -> memoryview:
    """Return chunk `number` of the copy with its checksum, read from the source. Raises BadCheckpoint."""
    meta, box = source.meta, run.chunk_box(number)
    ((rank, stored_box),) = overlap.find_stored_boxes(meta.registry, run.name, box)
    there = meta.files.get_rank_file(rank).by_box[run.name, stored_box.offset]
    index = 0
    for at, start, side, chunks in zip(run.index(number), stored_box.offset, run.chunk, there.grid, strict=True):
        index = index * chunks + at - start // side
    content = memoryview(bytearray(run.nbytes + meta.trailer))
    path = meta.get_file_path(rank)
    try:
        source.store.read_into(path, [(there.base + index * there.stride, [content])])
        why = meta.find_chunk_error(there, index, checksum_of(content[: run.nbytes]), content[run.nbytes :])
    except (OSError, EOFError) as error:
        why = str(error)
    if why:
        raise BadCheckpoint(run.name, box.limits, f"{source.store.url}/{path}", why)
    return content[: run.nbytes + CHECKSUM]
