"""Token files of others, read as they are: Megatron-LM's .bin with its .idx, nanoGPT's and llm.c's .bin, MosaicML's
MDS, and columns of tokens in Arrow files (Hugging Face datasets) and Parquet."""

from __future__ import annotations

from pathlib import Path

from gangline import UserError
from gangline_dataloader.store.foreign.splits import ARROW, is_pattern, list_table_folders
from gangline_dataloader.store.foreign.vector import ForeignTokens
from gangline_dataloader.store.manifest import FILE


def is_foreign(path: str | Path) -> bool:
    """Whether a path names such a file or folder rather than a store of ours."""
    return str(path).endswith(".bin") or has_columns(path)


def has_columns(path: str | Path) -> bool:
    """Whether it has columns, one of which holds the tokens."""
    place = Path(path).expanduser()
    if not place.is_dir() or (place / FILE).exists():
        return place.suffix in ARROW or ("://" not in str(path) and is_pattern(place))
    if (place / "index.json").exists() or any(file.suffix in ARROW for file in place.iterdir()):
        return True
    return bool(list_table_folders(place))


def open_tokens(path: str | Path, vocab_size: int, column: str | None = None) -> ForeignTokens:
    """The tokens in a file or folder; one that is not below `vocab_size` is refused when it is read.

    column  of MDS, Arrow and Parquet: its name, and for raw bytes NAME:DTYPE; of a raw .bin :DTYPE (uint16, uint32,
            int32, int64); None: the usual one
    Raises UserError where it, or the index beside it, is not what it says.
    """
    from gangline_dataloader.store.foreign import arrow, mds, megatron, plain

    file = Path(path).expanduser()
    if (file / "index.json").exists():
        return mds.open_tokens(file, vocab_size, column)
    if has_columns(file):
        return arrow.open_tokens(file, vocab_size, column)
    if not file.with_suffix(".idx").exists():
        return plain.open_tokens(file, vocab_size, column)
    if column is not None:
        raise UserError(f"data.column={column}: {file} has no columns, and its .idx says the dtype.")
    return megatron.open_tokens(file, vocab_size)
