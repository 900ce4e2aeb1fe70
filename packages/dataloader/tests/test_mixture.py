"""Sample order of a mixture: exact proportions, each row once per epoch, independent of the starting point."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gangline_dataloader.order.mixture import BLOCK, Exhausted, Ingredient, MixtureOrder, WeightStage, normalise_weights

weights = st.one_of(st.just(0.0), st.floats(0.001, 1.0))


@st.composite
def mixtures(draw, epochs=None):
    count = draw(st.integers(1, 5))
    sources = [
        Ingredient(f"source {k}", draw(st.integers(1, 5000)), epochs=draw(epochs) if epochs is not None else None)
        for k in range(count)
    ]
    stages, start = [], 0
    for _ in range(draw(st.integers(1, 3))):
        found = draw(st.lists(weights, min_size=count, max_size=count).filter(any))
        stages.append(WeightStage(start, tuple(found)))
        start += draw(st.integers(1, 2 * BLOCK))
    return MixtureOrder(sources, stages, "seed", draw(st.integers()))


@settings(max_examples=25, deadline=None)
@given(order=mixtures(), data=st.data())
def test_each_source_is_read_epoch_by_epoch(order, data):
    """Check that each finished epoch of a source shows each row once, and that count_used() counts the samples."""
    many = data.draw(st.integers(1, 2 * BLOCK))
    place = order(np.arange(many))
    assert np.array_equal(order.count_used(many), np.bincount(place.source, minlength=len(order.rows)))
    for k, rows in enumerate(order.rows):
        mine = place.source == k
        assert np.array_equal(place.epoch[mine], np.arange(mine.sum()) // rows)
        for epoch in np.unique(place.epoch[mine])[:3]:
            seen = place.row[mine & (place.epoch == epoch)]
            assert len(np.unique(seen)) == len(seen)
            assert seen.max() < rows


@settings(max_examples=60, deadline=None)
@given(order=mixtures(), data=st.data())
def test_batch_is_independent_of_rank_count_and_history(order, data):
    start, size = data.draw(st.integers(0, 10**12)), data.draw(st.integers(1, 64))
    whole = order(np.arange(start, start + size))
    width = data.draw(st.integers(1, 8))
    cuts = [start + size * rank // width for rank in range(width + 1)]
    again = MixtureOrder(
        order.ingredients, [WeightStage(p.start, tuple(map(float, p.shares))) for p in order.phases], *order.key
    )
    parts = [again(np.arange(a, b)) for a, b in itertools.pairwise(cuts) if b > a]
    for name in ("source", "epoch", "row"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        if order.phases == again.phases:  # converting shares to floats is exact for most weights, but not for all
            assert np.array_equal(getattr(whole, name), joined)
        assert np.array_equal(getattr(whole, name), getattr(order(np.arange(start, start + size)[::-1]), name)[::-1])


@settings(max_examples=25, deadline=None)
@given(order=mixtures(epochs=st.integers(1, 4)))
def test_a_source_ends_after_its_epochs(order):
    """Check that a source never gives more than its epochs, and gives all of them if no weight is 0."""
    wanted = sum(one.rows * one.epochs for one in order.ingredients)
    assert order.end is not None
    assert order.end <= wanted
    place = order(np.arange(order.end))
    for k, one in enumerate(order.ingredients):
        assert (place.source == k).sum() <= one.rows * one.epochs
        assert place.epoch[place.source == k].max(initial=0) < one.epochs
    assert MixtureOrder(order.ingredients, [WeightStage(0, (1,) * len(order.ingredients))], *order.key).end == wanted
    with pytest.raises(Exhausted, match=str(order.end)):
        order(np.array([order.end]))


@pytest.mark.parametrize(
    "given_weights", [(0.5, 0.3, 0.2), (0.001, 0.999, 0.0), (1 / 65536, 1 - 1 / 65536, 0), (7, 2, 1)]
)
def test_long_run_proportions_are_exact(given_weights):
    order = MixtureOrder([Ingredient(n, 10**9) for n in "abc"], [WeightStage(0, given_weights)], 1)
    for many in (BLOCK, 1_000_000, 10**12 // BLOCK * BLOCK):
        assert order.count_used(many) == pytest.approx(
            np.array(given_weights) / sum(given_weights) * many, rel=1e-3, abs=60
        )
    blocks = 10**12 // BLOCK
    assert order.count_used(blocks * BLOCK) == pytest.approx(
        np.array(given_weights) / sum(given_weights) * blocks * BLOCK, abs=1
    )


def test_new_stage_keeps_earlier_samples():
    sources = [Ingredient("a", 1000), Ingredient("b", 333)]
    before = MixtureOrder(sources, [WeightStage(0, (1, 1))], 0)
    after = MixtureOrder(sources, [WeightStage(0, (1, 1)), WeightStage(70_001, (0, 1))], 0)
    old, new = before(np.arange(70_001)), after(np.arange(80_000))
    assert np.array_equal(old.row, new.row[:70_001])
    assert np.array_equal(old.source, new.source[:70_001])
    assert (new.source[70_001:] == 1).all()


def test_added_source_does_not_reshuffle_others():
    one = MixtureOrder([Ingredient("a", 500)], [WeightStage(0, (1,))], 0)(np.arange(500))
    two = MixtureOrder([Ingredient("b", 70), Ingredient("a", 500)], [WeightStage(0, (1, 1))], 0)(np.arange(1200))
    assert np.array_equal(one.row, two.row[two.source == 1][:500])


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ((-1, 2), "at least 0"),
        ((0, 0), "zero"),
        ((1e-6, 1), "1/65536"),
        ((float("nan"), 1), "nan"),
        ((float("inf"), 1), "inf"),
    ],
)
def test_invalid_weights_are_refused(bad, why):
    with pytest.raises(ValueError, match=why):
        normalise_weights(bad)


def test_invalid_stages_are_refused():
    source = [Ingredient("a", 10)]
    for stages in ([], [WeightStage(5, (1,))], [WeightStage(0, (1,)), WeightStage(0, (1,))], [WeightStage(0, (1, 1))]):
        with pytest.raises(ValueError):
            MixtureOrder(source, stages)


def test_start_at_late_sample_computes_only_one_block():
    """Count the computed blocks instead of seconds: one block at any position."""
    for number in (0, 10**6, 10**15):
        order = MixtureOrder([Ingredient("a", 10**8), Ingredient("b", 10**6)], [WeightStage(0, (1, 2))], 0)
        order(np.arange(number // BLOCK * BLOCK, number // BLOCK * BLOCK + 16))
        assert order._table.cache_info().misses == 1
