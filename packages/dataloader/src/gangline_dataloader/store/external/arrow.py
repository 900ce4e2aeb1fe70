"""Columns of tokens in Arrow files, as Hugging Face datasets writes them, and in Parquet. Each row is a document.

The values of a column are contiguous in a record batch: Arrow files are mapped and read without a copy; a row group of
Parquet is decoded when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from gangline import UserError
from gangline_dataloader.store.external.columns import UNTRAINED, check_trained, choose_column
from gangline_dataloader.store.external.splits import is_pattern, list_table_files
from gangline_dataloader.store.external.vector import ExternalTokens, sample
from gangline_dataloader.store.watch import WatchedFiles

KEPT = 32  # maximum number of decoded Parquet row groups in memory
PROBED = 1 << 22  # maximum number of mask values to check; if there are more, three parts of each column


@dataclass(frozen=True)
class _Part:
    """A record batch or row group: its numbers of tokens and rows, and a function that returns the column."""

    file: Path
    tokens: int
    rows: int
    column: Callable[[], Any]


@dataclass(frozen=True)
class _Mask:
    """A part of a column that may mark tokens as not trained on.

    lowest  returns the lowest value of the part, None if the part has no values
    values  number of values that `lowest` reads; 0 if the file's statistics have the lowest value
    """

    file: Path
    tokens: str
    name: str
    values: int
    lowest: Callable[[], float | None]


class ArrowTokens(ExternalTokens):
    """The tokens of a column, row after row. An empty row counts as a document, but has no document end."""

    def __init__(
        self,
        path: Path,
        files: list[Path],
        parts: list[_Part],
        dtype: np.dtype,
        vocab_size: int,
        watched: WatchedFiles,
    ) -> None:
        rows = np.cumsum([0, *(one.rows for one in parts)])
        self.documents_before = np.array([first for first, one in zip(rows, parts, strict=False) if one.tokens])
        parts = [one for one in parts if one.tokens]
        self.name, self._parts, self.watched = str(path), parts, watched
        digest = blake2b(repr([(one.tokens, one.rows) for one in parts]).encode(), digest_size=16)
        for file in files:
            sample(file, digest, 16)
        super().__init__(
            [one.tokens for one in parts],
            dtype,
            vocab_size=vocab_size,
            end_of_text=None,
            identity=digest.hexdigest(),
            documents=int(rows[-1]),
            keep=(keep := KEPT if files[0].suffix == ".parquet" else None),
        )
        self._row_ends = lru_cache(keep)(self._open_row_ends)

    def open(self, shard: int) -> np.ndarray:
        part = self._parts[shard]
        self.watched.look_at(part.file)
        tokens = _get_values(self.name, part.column())
        if len(tokens) != part.tokens:
            raise UserError(
                f"{self.name}: part {shard} has {len(tokens)} tokens, and its header records {part.tokens}."
            )
        return tokens

    def open_ends(self, shard: int) -> np.ndarray:
        ends = self.get_all_ends(shard)
        filled = np.diff(ends, prepend=0) > 0
        return ends if filled.all() else ends[filled]

    def get_all_ends(self, shard: int) -> np.ndarray:
        return self._row_ends(shard)

    def _open_row_ends(self, shard: int) -> np.ndarray:
        return _compute_row_ends(self._parts[shard].column())


def open_tokens(path: Path, vocab_size: int, column: str | None) -> ArrowTokens:
    """Open the tokens of a file, a folder as `Dataset.save_to_disk` writes it, or the files that a pattern matches.

    Raises UserError if the files cannot be read, the column is not lists of integers, or a mask excludes tokens.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow.", "", "pip install 'gangline-dataloader[parquet]'") from error
    files = _list_files(path)
    parts: list[_Part] = []
    masks: list[_Mask] = []
    dtypes, watched_files = set(), WatchedFiles()
    for file in files:
        try:
            watched_files.add(file, None)
            table = _open_parquet if file.suffix == ".parquet" else _open_stream
            file_parts, kind, beside = table(file, column)
        except pyarrow.ArrowException as error:
            raise UserError(f"{file} cannot be read.", str(error).splitlines()[0]) from error
        except OSError as error:
            raise UserError(f"{file} cannot be read.", error.strerror or str(error)) from error
        dtypes.add(_get_dtype(file, kind))
        parts += file_parts
        masks += beside
    if not any(part.tokens for part in parts):
        raise UserError(f"{path} contains no tokens.")
    if len(dtypes) > 1:
        raise UserError(
            f"{path} has tokens of {' and '.join(sorted(map(str, dtypes)))}.", "All files must have one dtype."
        )
    for mask in _select_probes(masks):
        try:
            lowest = mask.lowest()
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(
                f"{mask.file} cannot be read.", f"Column {mask.name}: {str(error).splitlines()[0]}"
            ) from error
        check_trained(str(mask.file), mask.tokens, mask.name, lowest)
    return ArrowTokens(path, files, parts, dtypes.pop(), vocab_size, watched_files)


def _select_probes(masks: list[_Mask]) -> list[_Mask]:
    """Select the masks to check: all, or if they have more than `PROBED` values without statistics, a sample.

    The sample has all masks with statistics, and the first, middle and last of the other masks of each column.
    """
    known_masks, unknown = [one for one in masks if not one.values], [one for one in masks if one.values]
    if sum(one.values for one in unknown) > PROBED:
        by_name = [[one for one in unknown if one.name == name] for name in UNTRAINED]
        unknown = [some[at] for some in by_name if some for at in sorted({0, len(some) // 2, len(some) - 1})]
    return known_masks + unknown


def _list_mask_names(schema: Any, column: str) -> list[str]:
    """List the columns of lists of numbers that may mark tokens as not trained on."""
    from pyarrow import types

    def is_mask(kind: Any) -> bool:
        if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
            return False
        inner = kind.value_type
        return types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner)

    names = [one for one in UNTRAINED if one != column and schema.names.count(one) == 1]
    return [one for one in names if is_mask(schema.field(one).type)]


def _find_lowest(read: Callable[[], Any]) -> float | None:
    import pyarrow.compute as compute

    values = read()
    values.validate(full=True)
    return compute.min_max(values.flatten())["min"].as_py()


def _list_files(path: Path) -> list[Path]:
    if path.is_file() or not (path.exists() or is_pattern(path)):
        return [path]
    if (path / "state.json").exists():  # Dataset.save_to_disk records the files and their order
        try:
            state = json.loads((path / "state.json").read_bytes())
            names = [one["filename"] for one in state["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path / 'state.json'} is damaged.", str(error)) from error
        return [path / Path(name).name for name in names]
    return list_table_files(path)


def _open_stream(file: Path, asked: str | None) -> tuple[list[_Part], Any, list[_Mask]]:
    """Map an Arrow stream or file and return (parts, type of the column, masks).

    Raises ArrowInvalid if a length reaches beyond its buffer, and UserError for a wrong column.
    """
    import pyarrow
    from pyarrow import ipc

    memory = pyarrow.memory_map(str(file))
    try:
        reader = ipc.open_file(memory)
        batches = [reader.get_batch(n) for n in range(reader.num_record_batches)]
    except pyarrow.ArrowInvalid:
        memory.seek(0)
        reader = ipc.open_stream(memory)
        batches = list(reader)
    column = choose_column(str(file), reader.schema.names, asked)
    parts = []
    for values in (batch.column(column) for batch in batches):
        values.validate(full=True)  # without it, pyarrow reads past the buffers of a file with a wrong length
        parts.append(_Part(file, len(_get_values(str(file), values)), len(values), partial(_return_values, values)))
    masks = [
        _Mask(file, column, name, part.tokens, partial(_find_lowest, partial(_return_values, batch.column(name))))
        for name in _list_mask_names(reader.schema, column)
        for part, batch in zip(parts, batches, strict=True)
        if part.tokens
    ]
    return parts, reader.schema.field(column).type, masks


def _return_values(values: Any) -> Any:
    return values


def _open_parquet(file: Path, asked: str | None) -> tuple[list[_Part], Any, list[_Mask]]:
    """Open a Parquet file and return (parts, type of the column, masks); each row group is a part.

    Numbers of tokens come from the file's statistics; without them a row group is decoded.
    """
    import pyarrow.parquet as parquet

    table = parquet.ParquetFile(file)
    column = choose_column(str(file), table.schema_arrow.names, asked)
    kind, beside = table.schema_arrow.field(column).type, _list_mask_names(table.schema_arrow, column)

    def read(group: int, name: str) -> Any:
        return parquet.ParquetFile(file).read_row_group(group, columns=[name]).column(name).combine_chunks()

    parts, masks = [], []
    for group in range(table.metadata.num_row_groups):
        about = table.metadata.row_group(group)
        leaves = [about.column(n) for n in range(about.num_columns)]
        # Statistics may count empty and null rows as values, and a name with a dot may mean a field of another column.
        statistics = _find_statistics(leaves, column)
        if statistics is not None and statistics.null_count == 0:
            tokens = statistics.num_values
        else:
            tokens = len(_get_values(str(file), read(group, column)))
        parts.append(_Part(file, tokens, about.num_rows, partial(read, group, column)))
        for name in beside if tokens else []:
            mask_statistics = _find_statistics(leaves, name)
            if mask_statistics is not None and mask_statistics.has_min_max:
                masks.append(_Mask(file, column, name, 0, partial(_return_values, mask_statistics.min)))
            else:
                masks.append(_Mask(file, column, name, tokens, partial(_find_lowest, partial(read, group, name))))
    return parts, kind, masks


def _find_statistics(leaves: list[Any], column: str) -> Any:
    """Return a row group's statistics of a column; None if there are none, or if several leaves have its name."""
    matches = [one for one in leaves if f"{one.path_in_schema}.".startswith(f"{column}.")]
    return matches[0].statistics if len(matches) == 1 else None


def _get_dtype(file: Path, kind: Any) -> np.dtype:
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = kind.value_type
        if types.is_integer(inner):
            return np.dtype(inner.to_pandas_dtype())
    raise UserError(
        f"{file}: a column of {kind} cannot be a token column.",
        "Tokens are lists of integers.",
        "To tokenise text:  gangline data prepare FILE --out DIR",
    )


def _get_values(name: str, column: Any) -> np.ndarray:
    """Return all tokens of a column, without a copy. Raises UserError if a token is null."""
    values = column.flatten()
    if values.null_count:
        raise UserError(
            f"{name}: {values.null_count} tokens are null.",
            "A row may be null, but a token inside a row must be an integer.",
            "Write the rows again without null tokens.",
        )
    return values.to_numpy(zero_copy_only=False)


def _compute_row_ends(column: Any) -> np.ndarray:
    return np.cumsum(np.nan_to_num(column.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64))
