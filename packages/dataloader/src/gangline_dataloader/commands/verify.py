"""`gangline data verify DIR|URL`: every byte of a store against its manifest."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gangline import UserError
from gangline_dataloader.packing.pack_plan import pieces_of, planned, read as read_plan, rows_of
from gangline_dataloader.store.files import StoreFiles, files_at
from gangline_dataloader.store.manifest import Manifest, ends_of, file_of, loss_of, read
from gangline_dataloader.store.npy import checksum, mapped, nbytes_of


def run(argv: Sequence[str]) -> int:
    """Print what is damaged; 1 where anything is."""
    words = argparse.ArgumentParser(
        prog="gangline data verify", description="Read every byte and name what is damaged."
    )
    words.add_argument("store", metavar="DIR|URL")
    found = 0
    with files_at(words.parse_args(list(argv)).store) as whole:
        for one in filter(None, (whole, whole.held_out())):
            manifest = read(one.folder)
            bad = [*damage(one, manifest), *(line for T in planned(one.folder) for line in damage_of_plan(one, T))]
            found += len(bad)
            good = f"{one.name}: {len(manifest.shards)} shards, {manifest.tokens} tokens, all as written"
            print("\n".join(bad) or good)
    return 1 if found else 0


def damage_of_plan(store: StoreFiles, sequence_length: int) -> Iterator[str]:
    """A line for each file of a plan that is not as it was written."""
    try:
        columns = read_plan(store.folder, sequence_length, store.name).shards
    except UserError as error:
        yield _line(error)
        return
    for number, (pieces, rows) in enumerate(zip(columns.pieces, columns.rows, strict=True)):
        yield from damage_of(store, pieces_of(number, sequence_length), "<u4", 2 * pieces, columns.xxh3[number])
        yield from damage_of(store, rows_of(number, sequence_length), "<u4", rows, columns.rows_xxh3[number])


def damage(store: StoreFiles, manifest: Manifest) -> Iterator[str]:
    """A line for each thing that is wrong, most precise first."""

    def tokens(array: np.ndarray) -> str | None:
        most = int(array.max())
        return (
            f"token {most} is beyond the vocabulary of {manifest.vocab_size}" if most >= manifest.vocab_size else None
        )

    for number in range(len(manifest.shards)):
        shard = manifest.shards[number]

        def ends(array: np.ndarray, count: int = shard.tokens) -> str | None:
            ascend = array[-1] == count and (np.diff(array.astype(np.int64)) > 0).all()
            return None if ascend else f"the ends of documents do not ascend to {count}"

        yield from damage_of(store, file_of(number), manifest.dtype, shard.tokens, shard.xxh3, tokens)
        yield from damage_of(store, ends_of(number), "<u4", shard.documents, shard.ends_xxh3, ends)
        if shard.loss_xxh3 is not None:
            yield from damage_of(store, loss_of(number), "|u1", shard.tokens, shard.loss_xxh3)


def damage_of(
    store: StoreFiles,
    name: str,
    dtype: str,
    length: int,
    xxh3: str,
    look: Callable[[np.ndarray], str | None] = lambda array: None,
) -> Iterator[str]:
    """A line where a vector is not as it was written, or, as it was written, not what `look` says it should be."""
    try:
        with store.file(name, nbytes_of(dtype, length)) as path:
            array = mapped(path, dtype, length)
            why = "its bytes are not those that were written" if checksum(path) != xxh3 else look(array)
            if why is not None:
                yield f"{store.name}/{name}: {why}"
    except UserError as error:
        yield _line(error).replace(str(store.folder), store.name)


def _line(error: UserError) -> str:
    return str(error).replace("\n ", "")
