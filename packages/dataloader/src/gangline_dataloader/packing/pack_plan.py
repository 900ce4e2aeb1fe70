"""Pack plan: the pieces of documents that make each row, for one sequence length, in files next to the store's shards.

    pack-2048.json                   {"format": "gangline-pack", "version": 1, "sequence_length": 2048,
                                      "store": "9f...", "padding": 512, "documents_cut": 7,
                                      "shards": {"pieces": [...], "rows": [...], "xxh3": [...], "rows_xxh3": [...]},
                                      "checksum": "5d..."}
    shard-00000.pack-2048.npy        uint32, start and length of each piece, in tokens of the shard, row after row
    shard-00000.pack-2048.rows.npy   uint32, cumulative number of pieces at the end of each row

A row has up to T + 1 tokens, all from one shard, so that reading a row needs only that shard. Torch-free.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np

from gangline import UserError
from gangline_dataloader.packing.best_fit import pack_documents
from gangline_dataloader.store.durable import replace_json
from gangline_dataloader.store.fields import JsonFields, add_checksum
from gangline_dataloader.store.manifest import Manifest, name_ends_file
from gangline_dataloader.store.npy import NpyWriter, compute_file_size, map_vector
from gangline_dataloader.store.remote.tokens import is_remote
from gangline_dataloader.store.stored import StoreTokens

FORMAT, VERSION = "gangline-pack", 1


@dataclass
class PackedShards:
    """The shards of a pack plan, by column: each list has an entry for each shard."""

    pieces: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    xxh3: list[str] = field(default_factory=list)  # XXH3-128 of each file of `name_pack_file`
    rows_xxh3: list[str] = field(default_factory=list)  # XXH3-128 of each file of `name_pack_rows_file`


@dataclass(frozen=True)
class PackPlan:
    """The content of a pack plan's JSON file."""

    sequence_length: int
    store: str  # identity of the store that the plan belongs to
    padding: int  # number of padding tokens in all rows
    documents_cut: int  # number of documents that are longer than a row and were split
    shards: PackedShards

    @property
    def rows(self) -> int:
        return sum(self.shards.rows)

    def compute_identity(self, shards: int | None = None) -> str:
        """Compute a hash of all rows; with `shards`, the hash of a plan that has only the first `shards` shards."""
        columns = (self.shards.xxh3[:shards], self.shards.rows_xxh3[:shards])
        return blake2b(repr((self.sequence_length, columns)).encode(), digest_size=16).hexdigest()


def name_plan_file(sequence_length: int) -> str:
    """Return the name of the JSON file of the plan for a sequence length."""
    return f"pack-{sequence_length}.json"


def name_pack_file(shard: int, sequence_length: int) -> str:
    """Return the name of the file with the pieces of a shard's rows."""
    return f"shard-{shard:05d}.pack-{sequence_length}.npy"


def name_pack_rows_file(shard: int, sequence_length: int) -> str:
    """Return the name of the file with the cumulative number of pieces at the end of each row of a shard."""
    return f"shard-{shard:05d}.pack-{sequence_length}.rows.npy"


def make(folder: Path, manifest: Manifest, sequence_length: int) -> PackPlan:
    """Plan the rows of a store and write the plan, unless it exists.

    If shards were only appended to the store, the rows of its old shards are kept.
    The plan's JSON file is written last. Only one shard's document ends and rows are in memory at a time.
    """
    identity = manifest.compute_identity()
    shards, padding, cut = PackedShards(), 0, 0
    if (folder / name_plan_file(sequence_length)).exists():
        old_plan = read(folder, sequence_length)
        if old_plan.store == identity:
            return old_plan
        if manifest.match_prefix(old_plan.store) == len(old_plan.shards.rows):
            shards, padding, cut = old_plan.shards, old_plan.padding, old_plan.documents_cut
    for number, documents in enumerate(manifest.shards.documents[len(shards.rows) :], len(shards.rows)):
        ends = map_vector(folder / name_ends_file(number), "<u4", documents, manifest.shards.ends_xxh3[number])
        pieces, rows = pack_documents(ends, sequence_length + 1)
        padding += len(rows) * (sequence_length + 1) - int(pieces[:, 1].sum(dtype=np.int64))
        cut += int((np.diff(ends.astype(np.int64), prepend=0) > sequence_length + 1).sum())
        for names, lengths, sums, content in (
            (name_pack_file, shards.pieces, shards.xxh3, pieces.ravel()),
            (name_pack_rows_file, shards.rows, shards.rows_xxh3, rows),
        ):
            writer = NpyWriter(folder / names(number, sequence_length), "<u4")
            writer.write(content)
            sums.append(writer.close())
            lengths.append(len(content))
        shards.pieces[-1] //= 2
    plan = PackPlan(sequence_length, identity, padding, cut, shards)
    document = add_checksum({"format": FORMAT, "version": VERSION, **asdict(plan)})
    replace_json(folder / name_plan_file(sequence_length), document)
    return plan


def format_plan_command(name: str, sequence_length: int) -> str:
    """Return the command that plans sequences of `sequence_length` tokens for the store at the path or URL `name`."""
    if not is_remote(name):
        return f"gangline data prepare --out {name} --pack {sequence_length}"
    return (
        f"gangline data prepare --out DIR --pack {sequence_length}  for a local copy DIR of the store; then upload "
        f"DIR/*pack-{sequence_length}.* to {name}"
    )


def list_lengths(folder: Path) -> list[int]:
    """List the sequence lengths that a store has plans for, ascending."""
    names = (path.name.removeprefix("pack-").removesuffix(".json") for path in folder.glob("pack-*.json"))
    return sorted(int(name) for name in names if name.isdigit())


def read(folder: Path, sequence_length: int, name: str = "") -> PackPlan:
    """Read the plan for sequences of `sequence_length` tokens; `name` is the store's path or URL in messages.

    Raises UserError if the plan is missing or damaged.
    """
    name = name or str(folder)
    path = folder / name_plan_file(sequence_length)
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        lengths = list_lengths(folder)
        raise UserError(
            f"{name} has no pack plan for sequences of {sequence_length} tokens.",
            f"Sequence lengths with a pack plan: {', '.join(map(str, lengths)) or 'none'}.",
            format_plan_command(name, sequence_length),
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read.", str(error)) from error
    document = JsonFields(content, str(path))
    if document.read_text("format") != FORMAT or document.read_number("version") != VERSION:
        raise document.explain_damage("format", f"expected {FORMAT}, version {VERSION}")
    if document.read_number("sequence_length") != sequence_length:
        raise document.explain_damage("sequence_length", f"expected {sequence_length}")
    inside = document.enter("shards")
    columns = PackedShards(
        inside.read_list("pieces", int),
        inside.read_list("rows", int),
        inside.read_checksums("xxh3"),
        inside.read_checksums("rows_xxh3"),
    )
    if len({len(column) for column in asdict(columns).values()}) != 1:
        raise inside.explain_damage("pieces", "expected lists of equal length")
    document.check()
    return PackPlan(
        sequence_length,
        document.read_text("store"),
        document.read_number("padding"),
        document.read_number("documents_cut"),
        columns,
    )


@dataclass(frozen=True)
class RowPieces:
    """Token ranges [start, stop) (n,) of a store, grouped by row: row r of N rows has the next `count[r]` ranges."""

    start: np.ndarray
    stop: np.ndarray
    count: np.ndarray

    def compute_offsets(self, first: np.ndarray) -> np.ndarray:
        """Return the output offset of each range (n,); row r begins at first[r] (N,), its ranges without gaps."""
        length = self.stop - self.start
        before = np.cumsum(length) - length
        rows = np.cumsum(self.count) - self.count
        return before + np.repeat(first - before[rows], self.count)


def expand_ranges(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Expand ranges of `count[i]` numbers from first[i] on, for each i, to one array (count.sum(),) int64."""
    before = np.cumsum(count) - count
    return np.arange(int(count.sum())) + np.repeat(first - before, count)


class PackedRows:
    """The packed rows of a store for one sequence length, in mapped files.

    Raises UserError if the plan is missing or belongs to another store, and when a row is read from a damaged file.
    """

    def __init__(self, store: StoreTokens, sequence_length: int) -> None:
        self.store, self.sequence_length = store, sequence_length
        self.plan = read(store.folder, sequence_length, store.name)
        if self.plan.store != store.identity or len(self.plan.shards.rows) != len(store.manifest.shards):
            raise UserError(
                f"{store.name}/{name_plan_file(sequence_length)} is the pack plan of another store.",
                f"The plan is for identity {self.plan.store}; the identity of the store is now {store.identity}.",
                format_plan_command(store.name, sequence_length),
            )
        self._tokens = np.concatenate([[0], np.cumsum(store.manifest.shards.tokens, dtype=np.int64)])
        self._rows = np.concatenate([[0], np.cumsum(self.plan.shards.rows, dtype=np.int64)])
        self._shard = lru_cache(store.keep)(self._open)

    @property
    def up_to(self) -> np.ndarray:
        """Cumulative number of rows at the end of each shard, (S,) int64."""
        return self._rows[1:]

    def locate_rows(self, rows: np.ndarray) -> RowPieces:
        """Locate the pieces of rows (N,). Raises UserError if a file of the plan is damaged."""
        shard_of = np.searchsorted(self._rows, rows, side="right") - 1
        shards = np.unique(shard_of).tolist()
        if len(shards) == 1:
            return self._locate_in_shard(shards[0], rows)
        here = [np.flatnonzero(shard_of == shard) for shard in shards]
        parts = [self._locate_in_shard(shard, rows[some]) for shard, some in zip(shards, here, strict=True)]
        count = np.concatenate([one.count for one in parts])
        back = np.argsort(np.concatenate(here))
        order = expand_ranges((np.cumsum(count) - count)[back], count[back])
        start, stop = (np.concatenate([getattr(one, name) for one in parts])[order] for name in ("start", "stop"))
        return RowPieces(start, stop, count[back])

    def _locate_in_shard(self, shard: int, numbers: np.ndarray) -> RowPieces:
        pieces, rows = self._shard(shard)
        inside = numbers - self._rows[shard]
        last = rows[inside].astype(np.int64)
        first = np.where(inside > 0, rows[np.maximum(inside - 1, 0)], 0).astype(np.int64)
        capacity, end = self.sequence_length + 1, int(self._tokens[shard + 1] - self._tokens[shard])
        bad = (first >= last) | (last - first > capacity) | (2 * last > len(pieces))
        if not bad.any():
            row_pieces = pieces.reshape(-1, 2)[expand_ranges(first, last - first)].astype(np.int64)
            starts = np.cumsum(last - first) - (last - first)
            long = np.add.reduceat(row_pieces[:, 1], starts) > capacity
            bad = long | np.logical_or.reduceat((row_pieces.sum(1) > end) | (row_pieces[:, 1] == 0), starts)
        if bad.any():
            path = f"{self.store.name}/{name_pack_file(shard, self.sequence_length)}"
            row = int(inside[np.argmax(bad)])
            raise UserError(f"{path} is damaged: row {row} is invalid.", "", f"gangline data verify {self.store.name}")
        start = row_pieces[:, 0] + self._tokens[shard]
        return RowPieces(start, start + row_pieces[:, 1], last - first)

    def get_expected_sizes(self) -> dict[str, int]:
        """Return the expected size in bytes of each file of the plan, by name."""
        T, columns, sizes = self.sequence_length, self.plan.shards, {}
        for number, (pieces, rows) in enumerate(zip(columns.pieces, columns.rows, strict=True)):
            sizes[name_pack_file(number, T)] = compute_file_size("<u4", 2 * pieces)
            sizes[name_pack_rows_file(number, T)] = compute_file_size("<u4", rows)
        return sizes

    def compute_shard_bytes(self) -> np.ndarray:
        """Compute the bytes of the plan's files of each shard, (number of shards,) int64."""
        columns = self.plan.shards
        pieces, rows = np.array(columns.pieces, np.int64), np.array(columns.rows, np.int64)
        return compute_file_size("<u4", 2 * pieces) + compute_file_size("<u4", rows)

    def _open(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        T, columns, file = self.sequence_length, self.plan.shards, self.store.map_shard_file
        return (
            file(name_pack_file(shard, T), "<u4", 2 * columns.pieces[shard], columns.xxh3[shard]),
            file(name_pack_rows_file(shard, T), "<u4", columns.rows[shard], columns.rows_xxh3[shard]),
        )
