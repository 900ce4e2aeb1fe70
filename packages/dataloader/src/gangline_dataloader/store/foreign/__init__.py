"""Token files of others, read as they are: Megatron-LM's .bin with its .idx, nanoGPT's and llm.c's .bin."""

from __future__ import annotations

from pathlib import Path

from gangline_dataloader.store.foreign.vector import Vector


def is_foreign(path: str | Path) -> bool:
    """Whether a path names such a file rather than a store of ours."""
    return str(path).endswith(".bin")


def opened(path: str | Path, vocab_size: int) -> Vector:
    """The tokens in a file; one that is not below `vocab_size` is refused when it is read.

    Raises UserError where the file, or the index beside it, is not what it says.
    """
    from gangline_dataloader.store.foreign import megatron, plain

    file = Path(path).expanduser()
    return (megatron if file.with_suffix(".idx").exists() else plain).opened(file, vocab_size)
