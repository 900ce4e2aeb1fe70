"""Pseudorandom permutation of rows: bijective for every n, and random by statistical tests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gangline_dataloader.order.permutation import KeyedPermutation, SpanPermutation

LARGE = 50_000_017


@pytest.mark.parametrize(
    "ranges",
    [
        [*range(1, 301), *(at + n for at in (512, 1024, 2048, 4096) for n in range(-2, 3))],
        pytest.param(range(301, 5001), marks=pytest.mark.nightly),
    ],
    ids=["few", "all"],
)
def test_every_small_range_is_permuted(ranges):
    for n in ranges:
        tweak = n % 7
        assert np.array_equal(np.sort(KeyedPermutation(n, "key", n % 5)(np.arange(n), tweak)), np.arange(n)), n


@settings(max_examples=300, deadline=None)
@given(n=st.integers(2, 1 << 48), key=st.integers(), tweak=st.integers(0, 1 << 40), data=st.data())
def test_large_range_permutation_is_injective(n, key, tweak, data):
    """Check a run of indices and some distant ones; an injective map on a finite set is a bijection."""
    first = data.draw(st.integers(0, n - 1))
    some = np.unique(
        np.concatenate(
            [np.arange(first, min(n, first + 500)), data.draw(st.just(np.linspace(0, n - 1, 200, dtype=np.int64)))]
        )
    )
    out = KeyedPermutation(n, key)(some, tweak)
    assert out.min() >= 0
    assert out.max() < n
    assert len(np.unique(out)) == len(some)


def chi_squared(values: np.ndarray, bins: int) -> float:
    """Return chi-squared per degree of freedom, the mean of blocks of 1024 neighbors; 1 for uniform draws."""
    blocks = values[: len(values) // 1024 * 1024].reshape(-1, 1024)
    expected = 1024 / bins
    counts = np.stack([np.bincount(block, minlength=bins) for block in blocks])
    return float((((counts - expected) ** 2 / expected).sum(1) / (bins - 1)).mean())


@pytest.mark.parametrize("n", [LARGE, 1 << 20, 262_016])
def test_permutation_is_statistically_random(n):
    """Check that high and low bits of neighbors are uniform, that neighbors land far apart, and that seeds differ.

    Blocks of 1024 out of 2**18 indices: the mean of 256 chi-squared values with 63 degrees of freedom has a standard
    deviation of 0.011, so the limits 0.9 and 1.1 are nine standard deviations from 1.
    """
    index = np.arange(min(n, 1 << 18))
    values = KeyedPermutation(n, "seed 0")(index)
    assert 0.9 < chi_squared(values * 64 // n, 64) < 1.1
    assert 0.9 < chi_squared(values % 64, 64) < 1.1
    assert np.abs(np.diff(values)).mean() / (n / 3) == pytest.approx(1, abs=0.02)
    for other in (KeyedPermutation(n, "seed 1")(index), KeyedPermutation(n, "seed 0")(index, 1), np.roll(values, 1)):
        assert abs(np.corrcoef(values, other)[0, 1]) < 0.01


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 3000), span=st.one_of(st.none(), st.integers(1, 4000)), epoch=st.integers(0, 1 << 20))
def test_span_bounds_row_displacement(n, span, epoch):
    out = SpanPermutation(n, span, "key")(np.arange(n), epoch)
    assert np.array_equal(np.sort(out), np.arange(n))
    reach = n if span is None else min(span, n)
    for start in range(0, n // reach * reach, reach):  # samples that are read together come from one span
        assert len(np.unique(out[start : start + reach] // reach)) == 1


def test_epochs_of_a_span_differ():
    first, second = (SpanPermutation(4000, 100, "key")(np.arange(4000), epoch) for epoch in (0, 1))
    assert (first == second).mean() < 0.05
    assert (first[:100] % 100 == first[100:200] % 100).mean() < 0.1  # each span has its own order
