"""`gangline data verify DIR|URL`: compare every byte of a store with the checksums of its manifest."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
import xxhash

from gangline import UserError
from gangline_dataloader.packing.pack_plan import (
    format_plan_command,
    list_lengths,
    name_pack_file,
    name_pack_rows_file,
    name_plan_file,
    read as read_plan,
)
from gangline_dataloader.store.files import StoreFiles, open_store_files
from gangline_dataloader.store.manifest import Manifest, Tokenizer, name_ends_file, name_loss_file, name_tokens_file
from gangline_dataloader.store.npy import compute_checksum, compute_file_size, map_vector

_OF_PLAN = re.compile(r"shard-\d+\.pack-(\d+)(?:\.rows)?\.npy")


def run(argv: Sequence[str]) -> int:
    """Print the damage of a store and of its validation part; return 1 if a file is damaged, else 0."""
    words = argparse.ArgumentParser(
        prog="gangline data verify", description="Read every byte of a token store and list the damaged files."
    )
    words.add_argument("store", metavar="DIR|URL")
    damage_count = 0
    with open_store_files(words.parse_args(list(argv)).store) as whole:
        try:
            stores = [one for one in (whole, whole.open_held_out()) if one is not None]
        except UserError as error:
            stores, damage_count = [whole], 1
            print(_format_error(error))
        for one in stores:
            try:
                manifest = one.read_manifest()
            except UserError as error:
                if one is whole:
                    raise
                damage_count += 1
                print(_format_error(error).replace(str(one.folder), one.name))
                continue
            bad = [*find_tokenizer_damage(one, manifest.tokenizer), *find_damage(one, manifest)]
            bad += list_lost_plans(one)
            bad += [line for T in list_lengths(one.folder) for line in find_plan_damage(one, manifest, T)]
            damage_count += len(bad)
            good = f"{one.name}: {len(manifest.shards)} shards, {manifest.tokens} tokens, no damage"
            print("\n".join(bad) or good)
    return 1 if damage_count else 0


def find_tokenizer_damage(store: StoreFiles, about: Tokenizer) -> Iterator[str]:
    """Yield a line for each file of the tokenizer that is missing or changed."""
    files = [(about.file, about.identity)] if about.file is not None else []
    for name, checksum in [*files, *zip(about.beside, about.beside_xxh3, strict=True)]:
        content = store.read_small_file(name)
        if content is None:
            yield f"{store.name}/{name}: the file is missing"
        elif checksum not in (xxhash.xxh3_128_hexdigest(content), blake2b(content, digest_size=8).hexdigest()):
            yield f"{store.name}/{name}: the checksum differs from the manifest"


def list_lost_plans(store: StoreFiles) -> Iterator[str]:
    """Yield a line for each pack plan whose JSON file is missing while its other files exist."""
    there = {int(match[1]) for name in store.list_names() if (match := _OF_PLAN.fullmatch(name))}
    for T in sorted(there - set(list_lengths(store.folder))):
        again = format_plan_command(store.name, T)
        file = f"{store.name}/{name_plan_file(T)}"
        yield f"{file}: the file is missing, but other files of the pack plan exist; to write the plan:  {again}"


def find_plan_damage(store: StoreFiles, manifest: Manifest, sequence_length: int) -> Iterator[str]:
    """Yield a line for each damaged file of a pack plan, and one if the plan is incomplete or of another store."""
    try:
        plan = read_plan(store.folder, sequence_length, store.name)
    except UserError as error:
        yield _format_error(error)
        return
    columns = plan.shards
    if plan.store != manifest.compute_identity() and manifest.match_prefix(plan.store) is None:
        yield f"{store.name}/{name_plan_file(sequence_length)}: the pack plan belongs to another store, {plan.store}"
    elif plan.store != manifest.compute_identity():
        file = f"{store.name}/{name_plan_file(sequence_length)}"
        yield (
            f"{file}: the pack plan covers {len(columns.rows)} of {len(manifest.shards)} shards, "
            "probably because an --append was killed: repeat that --append, or plan all shards:  "
            f"{format_plan_command(store.name, sequence_length)}"
        )
    for number, (pieces, rows) in enumerate(zip(columns.pieces, columns.rows, strict=True)):
        yield from find_vector_damage(
            store, name_pack_file(number, sequence_length), "<u4", 2 * pieces, columns.xxh3[number]
        )
        yield from find_vector_damage(
            store, name_pack_rows_file(number, sequence_length), "<u4", rows, columns.rows_xxh3[number]
        )


def find_damage(store: StoreFiles, manifest: Manifest) -> Iterator[str]:
    """Yield a line for each file of a store's shards that is damaged, or whose tokens or document ends are invalid."""

    def check_tokens(array: np.ndarray) -> str | None:
        most = int(array.max())
        return (
            f"token {most} is outside the vocabulary of {manifest.vocab_size} tokens"
            if most >= manifest.vocab_size
            else None
        )

    for number in range(len(manifest.shards)):
        shard = manifest.shards[number]

        def check_ends(array: np.ndarray, count: int = shard.tokens) -> str | None:
            ascend = array[-1] == count and (np.diff(array.astype(np.int64)) > 0).all()
            return None if ascend else f"the ends of documents are not ascending up to {count}, the number of tokens"

        yield from find_vector_damage(
            store, name_tokens_file(number), manifest.dtype, shard.tokens, shard.xxh3, check_tokens
        )
        yield from find_vector_damage(
            store, name_ends_file(number), "<u4", shard.documents, shard.ends_xxh3, check_ends
        )
        if shard.loss_xxh3 is not None:
            yield from find_vector_damage(store, name_loss_file(number), "|u1", shard.tokens, shard.loss_xxh3)


def find_vector_damage(
    store: StoreFiles,
    name: str,
    dtype: str,
    length: int,
    xxh3: str,
    look: Callable[[np.ndarray], str | None] = lambda array: None,
) -> Iterator[str]:
    """Yield a line if a vector's bytes have changed, or if `look` returns an error in the unchanged vector."""
    try:
        with store.get_local_file(name, compute_file_size(dtype, length)) as path:
            array = map_vector(path, dtype, length)
            why = "the checksum differs from the manifest" if compute_checksum(path) != xxh3 else look(array)
            if why is not None:
                yield f"{store.name}/{name}: {why}"
    except UserError as error:
        yield _format_error(error).replace(str(store.folder), store.name)


def _format_error(error: UserError) -> str:
    return str(error).replace("\n ", "")
