"""Conformance suite for gradient reductions (group `gradients`): sums of synthetic buckets, and resumed runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from gangline.config.schema import GradientsConfig
from gangline.gradients import GradientReduction
from gangline_testkit import gradients_ranks as ranks
from gangline_testkit.gradients_ranks import Sums
from gangline_testkit.pool import get_pool
from gangline_testkit.suite import PartSuite

ROUNDS = 40  # repeated sums of one gradient, whose mean is compared with the exact sum
HALF = 3  # number of steps before and after a resume
SLACK = 1.1  # maximum ratio of measured values to `count_sent` and `count_state`, because of padding
EXACT = 1e-6  # tolerance of a lossless sum in float32


class GradientsSuite(PartSuite):
    """Conformance suite for gradient reductions; subclass it with ``choice = "gradients=mine"``.

    settings   options of all tests; set `gradients.start_step=0`, or the tests see only the warm-up
    tolerance  maximum distance of the mean of 40 sums of equal gradients from the exact sum, relative to the norm of
               the exact sum. Error feedback makes the mean converge to the exact sum. Default 1e-6: a lossless sum
    layouts    settings of the runs on two ranks that are stopped and resumed; default ("parallel=ddp",)
    """

    tolerance: ClassVar[float] = EXACT
    layouts: ClassVar[tuple[str, ...]] = ("parallel=ddp",)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for name, values in (("world", (2, 4)), ("scatters", (False, True)), ("layout", self.layouts)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=str)

    def build_sums(self, **options: Any) -> Sums:
        return Sums(self.offer.part.build, self.run(*self.keep_chosen("parallel=ddp")), **{"steps": HALF, **options})

    def sum_buckets(self, world: int, **options: Any) -> list[list[list[Tensor]]]:
        """Return the sums of the synthetic buckets as [rank][step][bucket]."""
        totals: list[list[list[Tensor]]] = get_pool(world).run(ranks.sum_buckets, self.build_sums(**options))
        return totals

    # --- the part ----------------------------------------------------------------------------------------------------

    def test_build_returns_a_gradient_reduction(self) -> None:
        run = self.run()
        assert isinstance(self.build(self.build_config(run), run), GradientReduction)

    def test_lossy_reduction_declares_layout_dependence(self) -> None:
        """Check that `Part.layout_dependent` is set if sums are lossy, because lossy sums depend on the layout."""
        text = self.offer.part.layout_dependent
        assert self.tolerance <= EXACT or text, (
            "tolerance > 1e-6 needs Part.layout_dependent: describe how results depend on the layout"
        )

    def test_count_sent_and_count_state_are_upper_bounds(self, world: int, scatters: bool) -> None:
        """Check that a rank sends and stores at most 10 % more per bucket than `count_sent`, `count_state` return."""
        config = self.build_config(self.run())
        assert isinstance(config, GradientsConfig)
        size = ranks.LARGE.size
        told_sent = config.count_sent(size, world, scatters, 4)
        told_state = config.count_state(size, world, scatters)
        for nbytes, numbers in get_pool(world).run(ranks.count_bytes, self.build_sums(scatters=scatters)):
            assert nbytes <= SLACK * told_sent, (
                f"count_sent returns {told_sent:.0f} bytes, and a rank sends {nbytes} bytes"
            )
            assert numbers <= SLACK * told_state, (
                f"count_state returns {told_state} numbers, and a rank stores {numbers} numbers"
            )

    def test_state_arrays_depend_only_on_the_layout(self, world: int, scatters: bool) -> None:
        """Check that `get_array_shapes` depends only on the layout, so that each rank knows the arrays of all ranks."""
        shapes = ranks.describe_arrays(self.build_sums(scatters=scatters), world)
        count = len(ranks.BUCKETS)
        assert shapes[:count] == shapes[count : 2 * count] == shapes[2 * count :], (
            "get_array_shapes returns other arrays on a second call or from a new reduction"
        )
        for arrays in shapes[:count]:
            assert all(isinstance(length, int) and length >= 0 for shape in arrays.values() for length in shape)

    # --- sums --------------------------------------------------------------------------------------------------------

    def test_sums_are_bit_identical_on_all_ranks(self, world: int) -> None:
        for dtype in (torch.float32, torch.float64):
            first, *others = self.sum_buckets(world, dtype=dtype)
            for index, other in enumerate(others, 1):
                _check_same_bits(first, other, f"rank {index} has other bits of a sum than rank 0")

    def test_mean_of_sums_is_near_the_exact_sum(self, world: int, scatters: bool) -> None:
        """Check that the mean of 40 sums is near the exact sum. The scattered ranges of all ranks are concatenated."""
        totals = self.sum_buckets(world, steps=ROUNDS, constant=True, scatters=scatters)
        for number, layout in enumerate(ranks.BUCKETS):
            of_ranks = [
                sum((step[number].double() for step in of_rank), torch.zeros(())) / ROUNDS for of_rank in totals
            ]
            mean = torch.cat(of_ranks) if scatters else of_ranks[0]
            assert mean.shape == (layout.size,), (
                f"the sum of a bucket of {layout.size} elements has shape {tuple(mean.shape)}"
            )
            true = ranks.compute_exact(layout, number, 0, world)
            inside = torch.cat([torch.arange(slot.offset, slot.offset + slot.size) for slot in layout.slots])
            away = float((mean - true)[inside].norm() / true.norm())
            assert away <= self.tolerance, (
                f"the mean of {ROUNDS} sums differs by {away:.2g} of its norm from the exact sum; "
                f"tolerance={self.tolerance:.2g}"
            )

    @pytest.mark.parametrize("spoilt", [math.inf, math.nan])
    def test_sum_with_inf_or_nan_is_not_finite(self, world: int, scatters: bool, spoilt: float) -> None:
        """Check that the sum of a bucket with inf or nan is not finite, so that the step is skipped."""
        of_ranks = self.sum_buckets(world, steps=1, scatters=scatters, spoilt=spoilt)
        for number in range(len(ranks.BUCKETS)):
            totals = [step[number] for (step,) in of_ranks]
            flags = [not bool(total.isfinite().all()) for total in totals]
            assert any(flags) if scatters else all(flags), (
                f"a gradient is {spoilt}, and the sum of its bucket is finite"
            )

    def test_sums_in_flight_together_change_no_bit(self, world: int, scatters: bool) -> None:
        """Check that sums of buckets in flight at the same time are bit-identical to separate sums."""
        early = self.sum_buckets(world, late=False, scatters=scatters)
        _check_same_bits(
            early,
            self.sum_buckets(world, scatters=scatters),
            "the sum of a bucket changes if other buckets start before its wait",
        )

    def test_repeated_sums_are_bit_identical(self, world: int) -> None:
        _check_same_bits(
            self.sum_buckets(world), self.sum_buckets(world), "a second sum of the same gradients has other bits"
        )

    # --- state arrays ------------------------------------------------------------------------------------------------

    def test_state_arrays_are_the_complete_state(self, world: int, scatters: bool) -> None:
        """Check that a reduction rebuilt between steps from its state arrays continues bit-identically."""
        straight = self.sum_buckets(world, steps=2 * HALF, scatters=scatters)
        resumed = self.sum_buckets(world, steps=2 * HALF, scatters=scatters, handover=HALF)
        _check_same_bits(straight, resumed, "the reduction has state outside of its state arrays")

    def test_resumed_run_with_the_reduction_is_bit_identical(self, layout: str, tmp_path: Path) -> None:
        """Check that a resumed run is bit-identical to an uninterrupted run, and that replicas have equal weights."""
        words = (
            "run.deterministic=false",
            "batch.global_size=4",
            *self.keep_chosen(*layout.split()),
            *self.chosen,
            *self.settings,
        )
        straight = self.run_training(tmp_path / "straight", *words, f"run.steps={2 * HALF}")
        self.run_training(tmp_path / "resumed", *words, f"run.steps={HALF}")
        resumed = self.run_training(tmp_path / "resumed", *words, f"run.steps={2 * HALF}")
        for (records, weights, _), (again, others, names) in zip(straight, resumed, strict=True):
            losses = [(record.step, record.loss, record.grad_norm) for record in records]
            assert losses[HALF:] == [(record.step, record.loss, record.grad_norm) for record in again], names
            _check_same_weights(weights, others, "of the resumed run differ from the uninterrupted run")
        pieces: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        for _, weights, _ in straight:
            for name, offset, local in weights:
                assert torch.equal(pieces.setdefault((name, offset), local), local), (
                    f"weights {name} differ between replicas"
                )

    def run_training(self, run_dir: Path, *words: str) -> list[Any]:
        """Train on two ranks, and return (records, weights, names of layout-dependent arrays) of each rank."""
        return get_pool(2).run(ranks.run_training, run_dir, *words, "checkpoint.every=null")


def _check_same_bits(first: Any, second: Any, what: str) -> None:
    if isinstance(first, Tensor):
        assert torch.equal(first, second), what
        return
    for one, other in zip(first, second, strict=True):
        _check_same_bits(one, other, what)


def _check_same_weights(first: list[ranks.Held], second: list[ranks.Held], what: str) -> None:
    for (name, _, one), (_, _, other) in zip(first, second, strict=True):
        assert torch.equal(one, other), f"weights {name} {what}"
