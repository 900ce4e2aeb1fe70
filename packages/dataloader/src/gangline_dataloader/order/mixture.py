"""The order of a weighted mixture as a pure function: sample number -> (source, its epoch, its row).

Samples are assigned to sources in blocks of 65,536. After b blocks source k has

    count_k(b) = round(b · 65536 · W_k) - round(b · 65536 · W_{k-1}),      W_k = w_1 + ... + w_k, exact fractions

samples. So each count is within one sample of the exact share after any number of blocks, and needs no counter.
Inside a block the samples are shuffled by a hash of (key, phase, block, position in the block). The n-th sample of a
source is row n of its endless sequence of epochs, so that each epoch has each row once, whatever the weights.

Weights may change at any sample ("stages"), and a source may be used up after a number of epochs, after which the
other sources share its weight. Either change begins a new phase, with its own blocks, at a sample number that is a
function of the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import numpy as np

from gangline_dataloader.order.epochs import Sizes, SourceEpochs, grow_sizes
from gangline_dataloader.order.permutation import U64, derive_round_keys, mix

BLOCK = 1 << 16
LEAST = Fraction(1, BLOCK)  # minimum mixture weight of a source: one sample per block


@dataclass(frozen=True)
class Ingredient:
    """One source of a mixture.

    name    part of the key of its row order, so that adding another source does not reshuffle this source
    rows    number of rows in an epoch
    span    number of rows that are shuffled together; None: all rows
    epochs  number of epochs after which the source is used up; None: never
    sizes   history of a source that grew during a run: (sample number in the source, rows of each epoch from then on)
    """

    name: str
    rows: int
    span: int | None = None
    epochs: int | None = None
    sizes: Sizes | None = None


@dataclass(frozen=True)
class WeightStage:
    """The weights of the sources from sample `start` of the run on, in the order of the ingredients."""

    start: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class RowPlace:
    """Locations of samples (N,): index of the source, epoch of the source and row of the source, each (N,) int64."""

    source: np.ndarray
    epoch: np.ndarray
    row: np.ndarray


@dataclass(frozen=True)
class _Phase:
    """A range of samples with constant shares; `used` counts the samples of each source before the phase."""

    start: int
    shares: tuple[Fraction, ...]
    used: tuple[int, ...]

    def count_per_source(self, block: int) -> np.ndarray:
        """Count the samples of each source in the first `block` blocks of the phase, (K,) int64."""
        slots = block * BLOCK
        ends = [(2 * slots * w.numerator + w.denominator) // (2 * w.denominator) for w in accumulate(self.shares)]
        return np.diff(np.array([0, *ends], np.int64))


class Exhausted(LookupError):
    """Error: every source of a mixture is used up, and sample `at` is the first that does not exist."""

    def __init__(self, at: int) -> None:
        self.at = at
        super().__init__(f"all sources of the mixture are used up at sample {at}")


def normalise_weights(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """Normalise weights to exact fractions with sum 1; a zero stays zero.

    Raises ValueError if a weight is negative or not finite, if all weights are zero, and if a share above 0 is under
    1/65536, less than one sample of a block.
    """
    exact = []
    for weight in weights:
        if not np.isfinite(weight) or weight < 0:
            raise ValueError(f"the weight {weight} must be a finite number of at least 0")
        exact.append(Fraction(str(float(weight))))
    total = sum(exact)
    if not total:
        raise ValueError("all weights are zero")
    shares = tuple(weight / total for weight in exact)
    for weight, share in zip(weights, shares, strict=True):
        if 0 < share < LEAST:
            raise ValueError(
                f"the weight {weight} is a share of {float(share):.3g}; a share must be 0 or at least 1/65536"
            )
    return shares


class MixtureOrder:
    """The order of a weighted mixture, as the module describes it. Raises ValueError for invalid weights or stages."""

    def __init__(self, ingredients: Sequence[Ingredient], stages: Sequence[WeightStage], *key: object) -> None:
        self.ingredients, self.stages, self.key = tuple(ingredients), tuple(stages), key
        self.rows = np.array([one.rows for one in self.ingredients], np.int64)
        if not self.ingredients or (self.rows < 1).any():
            raise ValueError("a mixture needs at least one source, and each source needs at least one row")
        starts = [stage.start for stage in stages]
        if not stages or starts[0] != 0 or sorted(set(starts)) != starts:
            raise ValueError(f"stages begin at samples {starts}; expected ascending samples from 0")
        if any(len(stage.weights) != len(self.ingredients) for stage in stages):
            raise ValueError(f"each stage needs {len(self.ingredients)} weights, one for each source")
        self.epochs = [SourceEpochs(one.rows, one.span, *key, one.name, sizes=one.sizes) for one in self.ingredients]
        self._most = [
            None if one.epochs is None else each.end(one.epochs)
            for one, each in zip(self.ingredients, self.epochs, strict=True)
        ]
        self._table = lru_cache(maxsize=4)(self._make_table)
        self.phases, self.end = self._lay_out(stages)
        self._starts = np.array([phase.start for phase in self.phases], np.int64)

    def __call__(self, numbers: np.ndarray) -> RowPlace:
        """Locate samples `numbers` (N,) int64, which may be in any order. Raises Exhausted past the last sample."""
        numbers = np.asarray(numbers, np.int64)
        if self.end is not None and numbers.size and int(numbers.max()) >= self.end:
            raise Exhausted(self.end)
        source, ordinal = np.empty_like(numbers), np.empty_like(numbers)
        phase_of = np.searchsorted(self._starts, numbers, side="right") - 1
        block_of, slot = np.divmod(numbers - self._starts[phase_of], BLOCK)
        joint = np.stack([phase_of, block_of])
        for phase, block in np.unique(joint, axis=1).T:
            here = np.flatnonzero((phase_of == phase) & (block_of == block))
            sources, ordinals = self._table(int(phase), int(block))
            source[here], ordinal[here] = sources[slot[here]], ordinals[slot[here]]
        epoch, row = np.empty_like(ordinal), np.empty_like(ordinal)
        for k in np.unique(source):
            here = source == k
            epoch[here], row[here] = self.epochs[k](ordinal[here])
        return RowPlace(source, epoch, row)

    def count_used(self, number: int) -> np.ndarray:
        """Count the samples of each source before sample `number` of the run, (K,) int64."""
        phase = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._count_used(self.phases, phase, number)

    def resume_after(self, sizes: Mapping[str, Sequence[Sequence[int]]], cursor: int) -> MixtureOrder:
        """Return this order for a run that resumes at sample `cursor`, and whose sources had `sizes` up to there.

        The stages stay unchanged. From its next epoch on, each source has the number of rows that it has in this order.
        """
        before = self._replace_sources(sizes, {})
        now = [
            replace(one, sizes=grow_sizes(one.sizes, one.rows, n)) if one.sizes else one
            for one, n in zip(before.ingredients, before.count_used(cursor).tolist(), strict=True)
        ]
        return MixtureOrder(now, self.stages, *self.key)

    def gives_same_samples(
        self, sizes: Mapping[str, Sequence[Sequence[int]]], epochs: Mapping[str, int | None], cursor: int
    ) -> bool:
        """Return whether the samples up to `cursor` stay the same if `epochs` replaces the maximum epochs."""
        one, other = self._replace_sources(sizes, {}), self._replace_sources(sizes, epochs)
        return [p for p in one.phases if p.start < cursor] == [p for p in other.phases if p.start < cursor]

    def _replace_sources(
        self, sizes: Mapping[str, Sequence[Sequence[int]]], epochs: Mapping[str, int | None]
    ) -> MixtureOrder:
        ingredients = [
            replace(
                one,
                sizes=tuple((s, n) for s, n in sizes.get(one.name, ())) or None,
                epochs=epochs.get(one.name, one.epochs),
            )
            for one in self.ingredients
        ]
        return MixtureOrder(ingredients, self.stages, *self.key)

    def _make_table(self, phase: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        return self._assign_block(self.phases[phase], block)

    def _assign_block(self, phase: _Phase, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, number of the sample within its source), both (BLOCK,) int64, for one block of a phase."""
        before = phase.count_per_source(block)
        quota = phase.count_per_source(block + 1) - before
        salt = derive_round_keys(*self.key, "deal", phase.start, block)[0]
        hashed = mix(np.arange(BLOCK, dtype=U64) + salt)
        # The slot number in the low bits makes all values differ, so that every sort algorithm gives the same order.
        hashed = np.sort((hashed & U64(~(BLOCK - 1) & (1 << 64) - 1)) | np.arange(BLOCK, dtype=U64))
        sources = np.empty(BLOCK, np.uint16 if len(quota) < BLOCK else np.int64)
        sources[(hashed & U64(BLOCK - 1)).astype(np.int64)] = np.repeat(np.arange(len(quota)), quota)
        by_source = np.argsort(sources, kind="stable")
        ordinals = np.empty(BLOCK, np.int64)
        first = np.cumsum(quota) - quota
        base = np.array(phase.used, np.int64) + before - first
        ordinals[by_source] = np.arange(BLOCK) + np.repeat(base, quota)
        return sources.astype(np.int64), ordinals

    def _count_used(self, phases: Sequence[_Phase], phase: int, number: int) -> np.ndarray:
        here = phases[phase]
        block, slot = divmod(number - here.start, BLOCK)
        counts = np.array(here.used, np.int64) + here.count_per_source(block)
        if slot:
            counts += np.bincount(self._assign_block(here, block)[0][:slot], minlength=len(self.ingredients))
        return counts

    def _lay_out(self, stages: Sequence[WeightStage]) -> tuple[list[_Phase], int | None]:
        """Return the phases, and the sample at which all sources with a weight are used up; None: never."""
        phases: list[_Phase] = []
        queue = list(stages)
        start, weights = 0, queue[0].weights
        counts = np.zeros(len(self.ingredients), np.int64)
        while True:
            while queue and queue[0].start <= start:
                weights = queue.pop(0).weights
            parts = normalise_weights(weights)
            spent_flags = [most is not None and n >= most for most, n in zip(self._most, counts, strict=True)]
            rest = sum(part for part, gone in zip(parts, spent_flags, strict=True) if not gone)
            if not rest:
                return phases, start  # the data ends here, also if a later stage gives weight to other sources
            parts = tuple(Fraction(0) if gone else part / rest for part, gone in zip(parts, spent_flags, strict=True))
            phase = _Phase(start, parts, tuple(int(n) for n in counts))
            phases.append(phase)
            ends = [
                end for end in (queue[0].start if queue else None, self._find_first_exhausted(phase)) if end is not None
            ]
            if not ends:
                return phases, None
            start = min(ends)
            counts = self._count_used(phases, -1, start)

    def _find_first_exhausted(self, phase: _Phase) -> int | None:
        """Find the first sample of a phase at which a source has used up its epochs; None: no such sample."""
        ends: list[int] = []
        for k, most in enumerate(self._most):
            if most is None or not phase.shares[k]:
                continue
            remainder = most - phase.used[k]  # samples left until the source is used up
            low, high = 0, int(remainder / (BLOCK * phase.shares[k])) + 2
            while low < high:  # finds the last block that begins with fewer than `remainder` samples of the source
                middle = (low + high + 1) // 2
                low, high = (middle, high) if phase.count_per_source(middle)[k] < remainder else (low, middle - 1)
            slots = np.flatnonzero(self._assign_block(phase, low)[0] == k)
            ends.append(phase.start + low * BLOCK + int(slots[remainder - int(phase.count_per_source(low)[k]) - 1]) + 1)
        return min(ends, default=None)
