"""From options to a data source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gangline.data.codec import Bytes, Codec, Subwords
from gangline.errors import UserError
from gangline_dataloader.order.mixture import Ingredient
from gangline_dataloader.order.single import SingleOrder, TextOrder
from gangline_dataloader.prepare.run import VALIDATION
from gangline_dataloader.sources.windows import Order, WindowSource
from gangline_dataloader.store.local import LocalStore
from gangline_dataloader.store.manifest import FILE

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline.data import Split
    from gangline_dataloader.config import TokensConfig


def tokens(config: TokensConfig, run: Run, split: Split) -> WindowSource:
    """One store. Raises UserError where it cannot be read, or is too short for one sequence."""
    folder, T = Path(config.path or ""), run.batch.sequence_length
    held_out = folder / VALIDATION
    apart = (held_out / FILE).exists()
    store = LocalStore(held_out if apart and split == "validation" else folder)
    first, rows = 0, store.rows(T)
    if not apart:
        kept = rows - (max(1, round(rows * config.validation_fraction)) if config.validation_fraction else 0)
        first, rows = (kept, rows - kept) if split == "validation" else (0, kept)
    if rows < 1:
        raise UserError(
            f"data.path={config.path} is too short.",
            f"Its {split} part has {store.total} tokens; one sequence needs {T + 1}.",
            "Give it more text, or a smaller batch.sequence_length.",
        )
    span = None if config.shuffle_span is None else max(1, config.shuffle_span // T)
    order: Order
    if config.order == "text":
        order = TextOrder(rows, run.seed, split)
    else:
        order = SingleOrder(Ingredient("tokens", rows, span), run.seed, split)
    return WindowSource(
        [store],
        order,
        codec(store),
        sequence_length=T,
        documents=config.documents,
        identity=(config.order, run.seed, split, span, first, rows),
        samples=rows,
        first=first,
    )


def codec(store: LocalStore) -> Codec:
    """The vocabulary of a store, to show what was read as text."""
    about = store.manifest.tokenizer
    if about.file is None:
        return Bytes(chr(about.end_of_text or 0))
    return Subwords(str(store.folder / about.file), None, "replace")
