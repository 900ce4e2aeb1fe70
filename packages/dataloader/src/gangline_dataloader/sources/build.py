"""From options to a data source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gangline.data.codec import ByteCodec, TextCodec, TokenizerCodec
from gangline_dataloader.order.mixture import Ingredient
from gangline_dataloader.order.single import SingleOrder, TextOrder
from gangline_dataloader.sources.changing import GrowingSource, MixedSource
from gangline_dataloader.sources.mixture import mixture
from gangline_dataloader.sources.packed import PackedSource
from gangline_dataloader.sources.split import SplitRows, split_rows
from gangline_dataloader.sources.windows import SampleOrder, WindowSource
from gangline_dataloader.store.local import LocalTokens
from gangline_dataloader.store.tokens import Tokens

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline.data import Split
    from gangline_dataloader.config import MixConfig, TokensConfig


def tokens(config: TokensConfig, run: Run, split: Split) -> WindowSource:
    """One store. Raises UserError where it cannot be read, or is too short for one sequence."""
    T = run.batch.sequence_length
    path, vocabulary = config.path or "", run.model.vocab_size
    best_fit = config.packing == "best_fit"
    rows = split_rows("tokens", path, split, T, config.validation_fraction, "data.path", vocabulary, best_fit)
    span = None if config.shuffle_span is None else max(1, config.shuffle_span // T)
    order: SampleOrder
    if config.order == "text":
        order = TextOrder(rows.count, run.seed, split)
    else:
        order = SingleOrder(Ingredient(rows.name, rows.count, span), run.seed, split)
    cls = PackedSource if best_fit else GrowingSource if isinstance(order, SingleOrder) else WindowSource
    return cls(
        [rows],
        order,
        codec(rows.store),
        sequence_length=T,
        documents=config.documents,
        identity=(config.order, run.seed, split, span, *plans([rows])),
        samples=rows.count,
    )


def mix(config: MixConfig, run: Run, split: Split) -> WindowSource:
    """A weighted mixture of stores. Raises UserError for stores and weights that make none."""
    parts, order = mixture(config, run, split)
    return (PackedSource if config.packing == "best_fit" else MixedSource)(
        parts,
        order,
        codec(parts[0].store),
        sequence_length=run.batch.sequence_length,
        documents=config.documents,
        identity=("mix", run.seed, split, config.shuffle_span, *plans(parts)),
        samples=order.samples,
    )


def plans(parts: Sequence[SplitRows]) -> list[str]:
    """The identities of the plans that make the rows, where they are packed."""
    return [one.plan.plan.identity() for one in parts if one.plan is not None]


def codec(store: Tokens) -> TextCodec | None:
    """The vocabulary of a store, to show what was read as text; None where nobody knows it."""
    if not isinstance(store, LocalTokens):
        return None
    about = store.manifest.tokenizer
    if about.file is None:
        return ByteCodec(chr(about.end_of_text or 0))
    return TokenizerCodec(str(store.folder / about.file), None, "replace")
