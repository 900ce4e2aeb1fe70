"""`gangline data verify DIR|URL`: every byte of a store against its manifest."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
import xxhash

from gangline import UserError
from gangline_dataloader.packing.pack_plan import (
    command_to_plan,
    list_lengths,
    pieces_of,
    plan_of,
    read as read_plan,
    rows_of,
)
from gangline_dataloader.store.files import StoreFiles, files_at
from gangline_dataloader.store.manifest import Manifest, Tokenizer, ends_of, file_of, loss_of
from gangline_dataloader.store.npy import checksum, map_vector, nbytes_of

_OF_PLAN = re.compile(r"shard-\d+\.pack-(\d+)(?:\.rows)?\.npy")


def run(argv: Sequence[str]) -> int:
    """Print what is damaged; 1 where anything is."""
    words = argparse.ArgumentParser(
        prog="gangline data verify", description="Read every byte and name what is damaged."
    )
    words.add_argument("store", metavar="DIR|URL")
    found = 0
    with files_at(words.parse_args(list(argv)).store) as whole:
        try:
            stores = [one for one in (whole, whole.open_held_out()) if one is not None]
        except UserError as error:
            stores, found = [whole], 1
            print(_line(error))
        for one in stores:
            try:
                manifest = one.manifest()
            except UserError as error:
                if one is whole:
                    raise
                found += 1
                print(_line(error).replace(str(one.folder), one.name))
                continue
            bad = [*damage_of_tokenizer(one, manifest.tokenizer), *damage(one, manifest)]
            bad += list_lost_plans(one)
            bad += [line for T in list_lengths(one.folder) for line in damage_of_plan(one, manifest, T)]
            found += len(bad)
            good = f"{one.name}: {len(manifest.shards)} shards, {manifest.tokens} tokens, all as written"
            print("\n".join(bad) or good)
    return 1 if found else 0


def damage_of_tokenizer(store: StoreFiles, about: Tokenizer) -> Iterator[str]:
    """A line for each file of the tokenizer that is not as it was written."""
    files = [(about.file, about.identity)] if about.file is not None else []
    for name, wanted in [*files, *zip(about.beside, about.beside_xxh3, strict=True)]:
        content = store.small(name)
        if content is None:
            yield f"{store.name}/{name}: it is missing"
        elif wanted not in (xxhash.xxh3_128_hexdigest(content), blake2b(content, digest_size=8).hexdigest()):
            yield f"{store.name}/{name}: its bytes are not those that were written"


def list_lost_plans(store: StoreFiles) -> Iterator[str]:
    """A line for each plan whose document is missing, and whose other files are there."""
    there = {int(found[1]) for name in store.names() if (found := _OF_PLAN.fullmatch(name))}
    for T in sorted(there - set(list_lengths(store.folder))):
        again = command_to_plan(store.name, T)
        yield f"{store.name}/{plan_of(T)}: it is missing, and other files of the plan are there; to make it:  {again}"


def damage_of_plan(store: StoreFiles, manifest: Manifest, sequence_length: int) -> Iterator[str]:
    """A line for each file of a plan that is not as it was written."""
    try:
        plan = read_plan(store.folder, sequence_length, store.name)
    except UserError as error:
        yield _line(error)
        return
    columns = plan.shards
    if plan.store != manifest.identity() and manifest.match_prefix(plan.store) is None:
        yield f"{store.name}/{plan_of(sequence_length)}: it is a plan of another store, {plan.store}"
    elif plan.store != manifest.identity():
        yield (
            f"{store.name}/{plan_of(sequence_length)}: it plans {len(columns.rows)} of {len(manifest.shards)} shards, "
            "as where an --append was killed before its end: the same call finishes it; to plan all:  "
            f"{command_to_plan(store.name, sequence_length)}"
        )
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
            array = map_vector(path, dtype, length)
            why = "its bytes are not those that were written" if checksum(path) != xxh3 else look(array)
            if why is not None:
                yield f"{store.name}/{name}: {why}"
    except UserError as error:
        yield _line(error).replace(str(store.folder), store.name)


def _line(error: UserError) -> str:
    return str(error).replace("\n ", "")
