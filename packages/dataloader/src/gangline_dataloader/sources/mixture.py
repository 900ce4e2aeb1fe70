"""The parts and the sample order of `data=mix`, built from its options, with the checks of these options.

A run trains on the weighted mixture. It validates on the validation splits of the stores, with the weights of the first
stage, and reads each sequence once. When a store is used up, the other stores share its weight, until all are used up.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gangline import Problem, UserError
from gangline.config.suggest import suggest_near
from gangline.data.vocabulary import find_vocabulary_problems
from gangline_dataloader.order.mixture import Ingredient, MixtureOrder, RowPlace, WeightStage, normalise_weights
from gangline_dataloader.sources.infill import build_infill
from gangline_dataloader.sources.present import find_file_problems
from gangline_dataloader.sources.room import check_room
from gangline_dataloader.sources.split import SplitRows, open_split_parts
from gangline_dataloader.store.manifest import Manifest
from gangline_dataloader.store.stored import StoreTokens

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline.data.base import Split
    from gangline_dataloader.config import MixConfig

LAST = 10**15  # last sample that a stage may begin at: far beyond any run, and far below the limit of 64 bits
EXAMPLE = "'data.sources={web: DIR, code: DIR}' 'data.weights={web: 0.7, code: 0.3}'"


class TrainOrder:
    """The order of a mixture in training. `end` and `samples`: sample at which all sources are used up; None: never."""

    def __init__(self, mixture: MixtureOrder) -> None:
        self.mixture, self.end, self.samples = mixture, mixture.end, mixture.end

    @property
    def deciding(self) -> dict[str, Any]:
        return get_order_state(self.mixture)

    def __call__(self, numbers: np.ndarray) -> RowPlace:
        return self.mixture(numbers)

    def resume_after(self, sizes: Mapping[str, Sequence[Sequence[int]]], cursor: int) -> TrainOrder:
        """Return this order for a run that resumes at sample `cursor`.

        sizes: source -> its row counts before `cursor`, as [first sample, rows of each epoch from this sample on] pairs
        """
        return TrainOrder(self.mixture.resume_after(sizes, cursor))


class HeldOutOrder:
    """The order of a mixture in validation: each row once, then all rows again in the same order."""

    end: int | None = None

    def __init__(self, mixture: MixtureOrder) -> None:
        assert mixture.end, "every source of a validation mixture has one epoch"
        self.mixture, self.samples = mixture, mixture.end

    @property
    def deciding(self) -> dict[str, Any]:
        return get_order_state(self.mixture)

    def __call__(self, numbers: np.ndarray) -> RowPlace:
        return self.mixture(np.asarray(numbers, np.int64) % self.samples)


def get_order_state(mixture: MixtureOrder) -> dict[str, Any]:
    """Return the JSON value that determines the order, together with the key: exact shares, without zero shares."""
    stages = []
    for stage in mixture.stages:
        parts = zip(mixture.ingredients, normalise_weights(stage.weights), strict=True)
        stages.append([stage.start, {one.name: str(share) for one, share in parts if share}])
    sources = {one.name: [one.sizes or one.rows, one.epochs] for one in mixture.ingredients}
    return {"sources": sources, "stages": stages}


def build_mixture(config: MixConfig, run: Run, split: Split) -> tuple[list[list[SplitRows]], TrainOrder | HeldOutOrder]:
    """Build the parts of each source and the order of the sources, which are sorted by name.

    Raises UserError for stores that do not fit together, and for invalid weights, stages or epochs.
    """
    T = run.batch.sequence_length
    best_fit = config.packing == "best_fit"
    groups = [
        open_split_parts(
            name,
            folder,
            split,
            T,
            config.validation_fraction,
            f"data.sources.{name}",
            best_fit=best_fit,
            cache=config.make_remote_cache(),
        )
        for name, folder in sorted(config.sources.items())
    ]
    agree([part for parts in groups for part in parts])
    _check_names(config.epochs, config.sources, "data.epochs", whole=False)
    rows = {parts[0].name: sum(part.count for part in parts) for parts in groups}
    stages = make_stages(config, rows)
    held_out = split == "validation"
    span = None if config.shuffle_span is None else max(1, config.shuffle_span // T)
    ingredients = [
        Ingredient(name, count, span, 1 if held_out else config.epochs.get(name)) for name, count in rows.items()
    ]
    order = MixtureOrder(ingredients, stages[:1] if held_out else stages, run.seed, split)
    return groups, HeldOutOrder(order) if held_out else TrainOrder(order)


def agree(parts: list[SplitRows]) -> None:
    """Raise UserError if the stores differ in tokenizer, end of text, vocabulary size or dtype."""
    one, *others = parts
    first = _get_manifest(one)
    for other in others:
        its = _get_manifest(other)
        for what, own_value, theirs in (
            ("tokenizers", first.tokenizer.identity, its.tokenizer.identity),
            ("ends of text", first.tokenizer.end_of_text, its.tokenizer.end_of_text),
            ("vocabularies", first.vocab_size, its.vocab_size),
            ("dtypes", first.dtype, its.dtype),
        ):
            if own_value != theirs:
                raise UserError(
                    f"data.sources: {one.name} and {other.name} have different {what}.",
                    f"{one.name} has {own_value}, {other.name} has {theirs}; all stores must have equal token ids.",
                    "Prepare both stores with the same --tokenizer and --end-of-text.",
                )


def _get_manifest(part: SplitRows) -> Manifest:
    assert isinstance(part.store, StoreTokens), "a mixture consists of token stores"
    return part.store.manifest


def make_stages(config: MixConfig, rows: Mapping[str, int]) -> list[WeightStage]:
    """Make the stages of weights from data.weights and data.stages; `rows`: number of rows by source.

    Raises UserError for invalid weights or stages.
    """
    names = list(rows)
    if config.weights:
        _check_names(config.weights, names, "data.weights")
    weights = config.weights or {name: float(count) for name, count in rows.items()}
    stages = [_make_stage(0, weights, names, "data.weights")]
    for number, stage in enumerate(config.stages):
        option = f"data.stages[{number}]"
        start, new_weights = stage.get("from"), stage.get("weights")
        if set(stage) != {"from", "weights"} or not isinstance(new_weights, Mapping):
            raise UserError(
                f"{option}={dict(stage)} must have the keys `from` and `weights`.",
                "`from` is the first sample of the stage, and `weights` has a weight for each source.",
                "'data.stages=[{from: 100000, weights: {web: 0.5, code: 0.5}}]'",
            )
        if not isinstance(start, int) or isinstance(start, bool) or not stages[-1].start < start <= LAST:
            raise UserError(
                f"{option}.from={start} must be more than {stages[-1].start} and at most {LAST:,}.",
                "Stages are in ascending order of their first sample; data.weights applies from sample 0.",
            )
        _check_names(new_weights, names, f"{option}.weights")
        stages.append(_make_stage(start, new_weights, names, f"{option}.weights"))
    return stages


def _make_stage(start: int, weights: Mapping[str, Any], names: list[str], option: str) -> WeightStage:
    values = [weights[name] for name in names]
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        raise UserError(f"{option}={dict(weights)}: each weight must be a number.")
    try:
        normalise_weights(values)
    except ValueError as error:
        why = f"{str(error)[:1].upper()}{str(error)[1:]}."
        raise UserError(f"{option}={dict(weights)} is not a valid mixture.", why) from error
    return WeightStage(start, tuple(map(float, values)))


def _check_names(given: Mapping[str, Any], names: Any, option: str, whole: bool = True) -> None:
    """Raise UserError if a name is not a source, or with `whole`, if a source is missing."""
    for name in given:
        if name not in names:
            raise UserError(
                f"{option}.{name}: unknown source {name}.",
                suggest_near(str(name), list(names)),
                f"Sources: {', '.join(sorted(names))}.",
            )
    if missing := sorted(set(names) - set(given)) if whole else []:
        raise UserError(
            f"{option} has no weight for {', '.join(missing)}.", "To exclude a source, set its weight to 0."
        )


def _compute_max_steps(run: Run, samples: int) -> int:
    """Compute the maximum number of steps that read at most `samples` samples."""
    return bisect.bisect_right(range(samples + 2), samples, key=run.batch.compute_cursor) - 1


def find_problems(config: MixConfig, run: Run) -> list[Problem]:
    """Find the problems of a run with data=mix before its processes start. Reads manifests, but no tokens."""
    if not config.sources:
        return [
            Problem("data=mix needs data.sources.", "data.sources maps names to the paths of token stores.", EXAMPLE)
        ]
    if config.path is not None:
        what = f"data.path={config.path} has no effect: data=mix reads the stores of data.sources."
        return [Problem(what, "", "data.path=null, or data=tokens to read only this store")]
    if refused := config.check_fraction(run):
        return refused
    problems, read = [], []
    training = config is run.data
    for split in [*(["train"] if training else []), *(["validation"] if run.validate.every else [])]:
        try:
            groups, order = build_mixture(config, run, split)  # type: ignore[arg-type]
            parts = [part for group in groups for part in group]
            build_infill(config, [one.store for one in parts], run.seed, split)  # type: ignore[arg-type]
            read += parts
        except UserError as error:
            return [error.to_problem()]
        samples = run.batch.compute_cursor(run.steps)
        if split == "train" and order.end is not None and order.end < samples:
            ramp = f", batch.ramp={run.batch.ramp}" if run.batch.ramp else ""
            problems.append(
                Problem(
                    f"data=mix ends after {order.end} samples, and this run reads {samples}.",
                    f"run.steps={run.steps}, batch.global_size={run.batch.global_size}{ramp}; every source with a "
                    "weight has then reached its data.epochs.",
                    f"run.steps={max(1, _compute_max_steps(run, order.end))}, or larger data.epochs.",
                )
            )
        vocabulary = parts[0].store.vocab_size
        if split == "train":
            why = f"The tokenizer of the sources has {vocabulary} tokens."
            problems += find_vocabulary_problems(run.model.vocab_size, vocabulary, "data=mix", why)
    try:
        check_room(read, config.shuffle_span, config.cache_bytes, run.batch.sequence_length)
    except UserError as error:
        problems.append(error.to_problem())
    return problems or find_file_problems(read)
