"""Which sequences of a store are of which split: what was held out when it was prepared, else its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.errors import UserError
from gangline_dataloader.prepare.run import VALIDATION
from gangline_dataloader.store.foreign import is_foreign, opened
from gangline_dataloader.store.local import LocalTokens
from gangline_dataloader.store.manifest import FILE
from gangline_dataloader.store.tokens import Tokens

if TYPE_CHECKING:
    from gangline.data import Split


@dataclass(frozen=True)
class SplitRows:
    """The sequences of one split of a store: `count` of them, from row `first` on."""

    name: str  # of the source
    store: Tokens
    first: int
    count: int


def split_rows(
    name: str,
    folder: str,
    split: Split,
    sequence_length: int,
    validation_fraction: float,
    option: str,
    vocab_size: int | None = None,
) -> SplitRows:
    """One split of the store in `folder`, which `option` names; with a `vocab_size` it may be a file of others.

    Raises UserError where it cannot be read, or is too short for one sequence.
    """
    root = Path(folder).expanduser()
    held_out = root / VALIDATION
    apart = (held_out / FILE).exists()
    store: Tokens
    if vocab_size is not None and is_foreign(root):
        store = opened(root, vocab_size)
    else:
        store = LocalTokens(held_out if apart and split == "validation" else root)
    first, count = 0, store.rows(sequence_length)
    if not apart:
        kept = count - (max(1, round(count * validation_fraction)) if validation_fraction else 0)
        first, count = (kept, count - kept) if split == "validation" else (0, kept)
    if count < 1:
        tokens = store.total - first * sequence_length
        raise UserError(
            f"{option}={folder} is too short.",
            f"Its {split} part has {tokens} tokens; one sequence needs {sequence_length + 1}.",
            "Give it more text, or a smaller batch.sequence_length.",
        )
    return SplitRows(name, store, first, count)
