"""Token files in external formats, read without conversion: Megatron-LM's .bin with .idx, nanoGPT's and llm.c's .bin,
MosaicML's MDS, and columns of tokens in Arrow (Hugging Face datasets) and Parquet files."""

from __future__ import annotations

from pathlib import Path

from gangline import UserError
from gangline_dataloader.store.external.splits import ARROW, is_pattern, list_table_folders
from gangline_dataloader.store.external.vector import ExternalTokens
from gangline_dataloader.store.manifest import FILE


def is_external(path: str | Path) -> bool:
    """Return whether a path names a file or folder in an external format instead of a token store."""
    return str(path).endswith(".bin") or has_columns(path)


def has_columns(path: str | Path) -> bool:
    """Return whether a path names files with columns: MDS, Arrow or Parquet."""
    place = Path(path).expanduser()
    if not place.is_dir() or (place / FILE).exists():
        return place.suffix in ARROW or ("://" not in str(path) and is_pattern(place))
    if (place / "index.json").exists() or any(file.suffix in ARROW for file in place.iterdir()):
        return True
    return bool(list_table_folders(place))


def open_tokens(path: str | Path, vocab_size: int, column: str | None = None) -> ExternalTokens:
    """Open the tokens in a file or folder; reading a token outside the vocabulary raises UserError.

    column  MDS, Arrow and Parquet: name of the column, NAME:DTYPE for raw bytes; raw .bin: :DTYPE (uint16, uint32,
            int32, int64); None: the default column or dtype
    Raises UserError if the file or its index is damaged, or the column is missing.
    """
    from gangline_dataloader.store.external import arrow, mds, megatron, plain

    file = Path(path).expanduser()
    if (file / "index.json").exists():
        return mds.open_tokens(file, vocab_size, column)
    if has_columns(file):
        return arrow.open_tokens(file, vocab_size, column)
    if not file.with_suffix(".idx").exists():
        return plain.open_tokens(file, vocab_size, column)
    if column is not None:
        raise UserError(
            f"data.column={column}: {file} has no columns, and its .idx file records the dtype.", "", "data.column=null"
        )
    return megatron.open_tokens(file, vocab_size)
