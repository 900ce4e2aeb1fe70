"""Builders of the data sources data=tokens and data=mix from their options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline_dataloader.order.mixture import Ingredient
from gangline_dataloader.order.single import SingleOrder, TextOrder
from gangline_dataloader.sources.changing import (
    GrowingPackedSource,
    GrowingWindowSource,
    MixedPackedSource,
    MixedWindowSource,
)
from gangline_dataloader.sources.codec import open_codec
from gangline_dataloader.sources.infill import build_infill
from gangline_dataloader.sources.joined import join_groups
from gangline_dataloader.sources.mixture import build_mixture
from gangline_dataloader.sources.split import SplitRows, open_split_parts
from gangline_dataloader.sources.windows import MakeReader, SampleOrder, WindowSource

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline.data.base import Split
    from gangline_dataloader.config import MixConfig, SequenceConfig, TokensConfig


def build_tokens(config: TokensConfig, run: Run, split: Split, reader: MakeReader | None = None) -> WindowSource:
    """Build the source of data=tokens. Raises UserError if the store cannot be read or is too short for one sequence.

    reader  function that makes the batch reader; None: `WindowReader`
    """
    T = run.batch.sequence_length
    path, vocabulary = config.path or "", run.model.vocab_size
    best_fit = config.packing == "best_fit"
    option, cache = "data.path", config.make_remote_cache()
    parts = open_split_parts(
        "tokens", path, split, T, config.validation_fraction, option, vocabulary, best_fit, config.column, cache
    )
    span = None if config.shuffle_span is None else max(1, config.shuffle_span // T)
    rows = sum(part.count for part in parts)
    order: SampleOrder
    if config.order == "text":
        order = TextOrder(rows, run.seed, split)
    else:
        order = SingleOrder(Ingredient(parts[0].name, rows, span), run.seed, split)
    return (GrowingPackedSource if best_fit else GrowingWindowSource)(
        parts,
        join_groups(order, [parts]),
        open_codec(parts[0].store),
        sequence_length=T,
        documents=config.document_masking,
        identity=(config.order, run.seed, split, span, *get_infill_identity(config)),
        samples=rows,
        reach=span or 0,
        make_reader=reader,
        infill=build_infill(config, [one.store for one in parts], run.seed, split),
    )


def open_run_parts(config: TokensConfig, run: Run) -> list[SplitRows]:
    """Open the parts of all splits that a run of `data=tokens` reads. Raises UserError like `build_tokens`."""
    splits: tuple[Split, ...] = ("train", "validation") if run.validate.every else ("train",)
    if config is not run.data:  # `config` has the options of a validation set
        splits = ("validation",)
    return [part for split in splits for part in build_tokens(config, run, split).parts]


def build_mix(config: MixConfig, run: Run, split: Split) -> WindowSource:
    """Build the source of data=mix. Raises UserError for stores or weights that do not make a mixture."""
    groups, order = build_mixture(config, run, split)
    parts = [part for group in groups for part in group]
    return (MixedPackedSource if config.packing == "best_fit" else MixedWindowSource)(
        parts,
        join_groups(order, groups),
        open_codec(parts[0].store),
        sequence_length=run.batch.sequence_length,
        documents=config.document_masking,
        identity=("mix", run.seed, split, config.shuffle_span, *get_infill_identity(config)),
        samples=order.samples,
        reach=len(parts) * ((config.shuffle_span or 0) // run.batch.sequence_length),
        infill=build_infill(config, [one.store for one in parts], run.seed, split),
    )


def get_infill_identity(config: SequenceConfig) -> list[object]:
    """Return the fill-in-the-middle options that determine the samples; [] without fill-in-the-middle."""
    return [("infill", config.fim_rate, config.fim_spm_rate, tuple(config.fim_tokens))] if config.fim_rate else []
