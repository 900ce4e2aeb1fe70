"""Columns of tokens in Arrow files, as Hugging Face datasets writes them, and in Parquet. Each row is a document.

The values of a column lie one behind another in a record batch: of an Arrow file that is mapped they are read where
they are; a row group of Parquet is decoded when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from gangline import UserError
from gangline_dataloader.store.foreign.columns import chosen
from gangline_dataloader.store.foreign.splits import files_of, is_pattern
from gangline_dataloader.store.foreign.vector import ForeignTokens, sample
from gangline_dataloader.store.watch import WatchedFiles

KEPT = 32  # row groups of Parquet that are decoded at once


@dataclass(frozen=True)
class _Part:
    """A record batch, or a row group: how many tokens and rows, and how to come by the column."""

    file: Path
    tokens: int
    rows: int
    column: Callable[[], Any]


class ArrowTokens(ForeignTokens):
    """The rows of a column, one behind another."""

    def __init__(
        self,
        path: Path,
        files: list[Path],
        parts: list[_Part],
        dtype: np.dtype,
        vocab_size: int,
        watched: WatchedFiles,
    ) -> None:
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
            documents=sum(one.rows for one in parts),
            keep=KEPT if files[0].suffix == ".parquet" else None,
        )

    def open(self, shard: int) -> np.ndarray:
        part = self._parts[shard]
        self.watched.look_at(part.file)
        found = _values(self.name, part.column())
        if len(found) != part.tokens:
            raise UserError(f"{self.name}: part {shard} has {len(found)} tokens, and its header says {part.tokens}.")
        return found

    def open_ends(self, shard: int) -> np.ndarray:
        ends = _ends(self._parts[shard].column())
        return ends[np.diff(ends, prepend=0) > 0]  # an empty row is no document


def opened(path: Path, vocab_size: int, column: str | None) -> ArrowTokens:
    """The tokens of a file, or of a folder as `Dataset.save_to_disk` writes it, or of files by name.

    Raises UserError where they cannot be read, or the column holds no lists of whole numbers.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow.", "", "pip install 'gangline-dataloader[parquet]'") from error
    files = _files(path)
    parts: list[_Part] = []
    dtypes, watched = set(), WatchedFiles()
    for file in files:
        try:
            watched.add(file, None)
            table = _parquet if file.suffix == ".parquet" else _stream
            found, kind = table(file, column)
        except pyarrow.ArrowException as error:
            raise UserError(f"{file} cannot be read.", str(error).splitlines()[0]) from error
        except OSError as error:
            raise UserError(f"{file} cannot be read.", error.strerror or str(error)) from error
        dtypes.add(_dtype(file, kind))
        parts += [part for part in found if part.tokens]
    if not parts:
        raise UserError(f"{path} holds no tokens.")
    if len(dtypes) > 1:
        raise UserError(
            f"{path} has tokens of {' and '.join(sorted(map(str, dtypes)))}.", "All have to be of one dtype."
        )
    return ArrowTokens(path, files, parts, dtypes.pop(), vocab_size, watched)


def _files(path: Path) -> list[Path]:
    if path.is_file() or not (path.exists() or is_pattern(path)):
        return [path]
    if (path / "state.json").exists():  # Dataset.save_to_disk: which files, in which order
        try:
            state = json.loads((path / "state.json").read_bytes())
            names = [one["filename"] for one in state["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path / 'state.json'} is damaged.", str(error)) from error
        return [path / Path(name).name for name in names]
    return files_of(path)


def _stream(file: Path, asked: str | None) -> tuple[list[_Part], Any]:
    """An Arrow stream, or an Arrow file, mapped. Raises ArrowInvalid where a length reaches beyond its buffer."""
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
    column = chosen(str(file), reader.schema.names, asked)
    parts = []
    for values in (batch.column(column) for batch in batches):
        values.validate(full=True)  # pyarrow reads what stands behind the buffers of a file that lies about a length
        parts.append(_Part(file, len(_values(str(file), values)), len(values), partial(_same, values)))
    return parts, reader.schema.field(column).type


def _same(values: Any) -> Any:
    return values


def _parquet(file: Path, asked: str | None) -> tuple[list[_Part], Any]:
    """A row group is a part; how many values it has stands in the file's own statistics."""
    import pyarrow.parquet as parquet

    table = parquet.ParquetFile(file)
    column = chosen(str(file), table.schema_arrow.names, asked)
    kind = table.schema_arrow.field(column).type

    def read(group: int) -> Any:
        found = parquet.ParquetFile(file).read_row_group(group, columns=[column]).column(column)
        return found.combine_chunks()

    parts = []
    for group in range(table.metadata.num_row_groups):
        about = table.metadata.row_group(group)
        leaves = [about.column(n) for n in range(about.num_columns)]
        leaves = [one for one in leaves if f"{one.path_in_schema}.".startswith(f"{column}.")]
        # Empty and absent rows may count as values, and a name with a dot may stand for a field of another column.
        if len(leaves) == 1 and leaves[0].statistics is not None and leaves[0].statistics.null_count == 0:
            tokens = leaves[0].num_values
        else:
            tokens = len(_values(str(file), read(group)))
        parts.append(_Part(file, tokens, about.num_rows, partial(read, group)))
    return parts, kind


def _dtype(file: Path, kind: Any) -> np.dtype:
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = kind.value_type
        if types.is_integer(inner):
            return np.dtype(inner.to_pandas_dtype())
    raise UserError(
        f"{file}: a column of {kind} holds no tokens.",
        "Tokens are lists of whole numbers.",
        "Text becomes tokens by `gangline data prepare FILE --out DIR`.",
    )


def _values(name: str, column: Any) -> np.ndarray:
    """All tokens of a column, without a copy. Raises UserError where one is null: there is no such token."""
    values = column.flatten()
    if values.null_count:
        raise UserError(
            f"{name}: {values.null_count} tokens are null.",
            "A null inside of a row is no token; an absent row has none, and may be.",
            "Write the rows again without them.",
        )
    return values.to_numpy(zero_copy_only=False)


def _ends(column: Any) -> np.ndarray:
    return np.cumsum(np.nan_to_num(column.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64))
