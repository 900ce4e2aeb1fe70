"""`gangline data verify DIR`: every byte of a store against its manifest."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gangline import UserError
from gangline_dataloader.packing.pack_plan import pieces_of, planned, read as read_plan, rows_of
from gangline_dataloader.store.manifest import FILE, VALIDATION, Manifest, ends_of, file_of, loss_of, read
from gangline_dataloader.store.npy import checksum, mapped


def run(argv: Sequence[str]) -> int:
    """Print what is damaged; 1 where anything is."""
    words = argparse.ArgumentParser(
        prog="gangline data verify", description="Read every byte and name what is damaged."
    )
    words.add_argument("store", metavar="DIR")
    folder = Path(words.parse_args(list(argv)).store).expanduser()
    found = 0
    for one in (folder, folder / VALIDATION):
        if one == folder or (one / FILE).exists():
            manifest = read(one)
            bad = [*damage(one, manifest), *(line for T in planned(one) for line in damage_of_plan(one, T))]
            found += len(bad)
            print("\n".join(bad) or f"{one}: {len(manifest.shards)} shards, {manifest.tokens} tokens, all as written")
    return 1 if found else 0


def damage_of_plan(folder: Path, sequence_length: int) -> Iterator[str]:
    """A line for each file of a plan that is not as it was written."""
    try:
        columns = read_plan(folder, sequence_length).shards
    except UserError as error:
        yield str(error).replace("\n ", "")
        return
    for number, (pieces, rows) in enumerate(zip(columns.pieces, columns.rows, strict=True)):
        for path, length, digest in (
            (folder / pieces_of(number, sequence_length), 2 * pieces, columns.xxh3[number]),
            (folder / rows_of(number, sequence_length), rows, columns.rows_xxh3[number]),
        ):
            try:
                mapped(path, "<u4", length)
                if checksum(path) != digest:
                    yield f"{path}: its bytes are not those that were written"
            except UserError as error:
                yield str(error).replace("\n ", "")


def damage(folder: Path, manifest: Manifest) -> Iterator[str]:
    """A line for each thing that is wrong, most precise first."""
    for number in range(len(manifest.shards)):
        shard = manifest.shards[number]
        for name, dtype, length, digest in (
            (file_of(number), manifest.dtype, shard.tokens, shard.xxh3),
            (ends_of(number), "<u4", shard.documents, shard.ends_xxh3),
            (loss_of(number), "|u1", shard.tokens, shard.loss_xxh3),
        ):
            if digest is None:
                continue
            try:
                array = mapped(folder / name, dtype, length)
                if checksum(folder / name) != digest:
                    yield f"{folder / name}: its bytes are not those that were written"
                elif name == file_of(number) and int(array.max()) >= manifest.vocab_size:
                    yield f"{folder / name}: token {array.max()} is beyond the vocabulary of {manifest.vocab_size}"
                elif name == ends_of(number) and (
                    array[-1] != shard.tokens or (np.diff(array.astype(np.int64)) <= 0).any()
                ):
                    yield f"{folder / name}: the ends of documents do not ascend to {shard.tokens}"
            except UserError as error:
                yield str(error).replace("\n ", "")
