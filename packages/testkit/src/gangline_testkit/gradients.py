"""Conformance suite for gradient reductions (group `gradients`): synthetic buckets on several ranks, and runs."""

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
HALF = 3  # steps before and after a resume
SLACK = 1.1  # factor over the stated size of a bucket, for padding
EXACT = 1e-6  # tolerance of a lossless sum in float32


class GradientsSuite(PartSuite):
    """Conformance suite for gradient reductions; subclass it with ``choice = "gradients=mine"``.

    settings   options under which all tests run: without warm-up (`gradients.start_step=0`), or only warm-up is tested
    tolerance  largest distance of the mean of 40 sums of constant gradients from the exact sum, relative to its norm:
               with error feedback the mean converges to it. 1e-6 by default: a lossless sum
    layouts    settings of runs on two ranks that are stopped and resumed; ("parallel=ddp",) by default
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
        """Return the sums that each rank gets, by rank, step and bucket."""
        totals: list[list[list[Tensor]]] = get_pool(world).run(ranks.sum_buckets, self.build_sums(**options))
        return totals

    # --- the part ----------------------------------------------------------------------------------------------------

    def test_builds_a_reduction(self) -> None:
        run = self.run()
        assert isinstance(self.build(self.build_config(run), run), GradientReduction)

    def test_says_what_it_loses(self) -> None:
        """Check that `Part.layout_dependent` is stated if sums are not exact, and so depend on the layout."""
        text = self.offer.part.layout_dependent
        assert self.tolerance <= EXACT or text, "Part.layout_dependent does not say how losses depend on the layout"

    def test_says_bytes_and_numbers(self, world: int, scatters: bool) -> None:
        """Check that a rank sends and keeps at most 10 % more of a large bucket than `count_sent`, `count_kept` say."""
        config = self.build_config(self.run())
        assert isinstance(config, GradientsConfig)
        size = ranks.LARGE.size
        told_sent = config.count_sent(size, world, scatters, 4)
        told_kept = config.count_kept(size, world, scatters)
        for nbytes, numbers in get_pool(world).run(ranks.count_bytes, self.build_sums(scatters=scatters)):
            assert nbytes <= SLACK * told_sent, f"count_sent says {told_sent:.0f} bytes, and a rank sends {nbytes}"
            assert numbers <= SLACK * told_kept, f"count_kept says {told_kept} numbers, and a rank keeps {numbers}"

    def test_arrays_are_a_function_of_the_layout(self, world: int, scatters: bool) -> None:
        """Check that kept arrays depend on the layout alone, so that each rank can name the arrays of all ranks."""
        shapes = ranks.describe_arrays(self.build_sums(scatters=scatters), world)
        count = len(ranks.BUCKETS)
        assert shapes[:count] == shapes[count : 2 * count] == shapes[2 * count :], "other arrays the second time"
        for arrays in shapes[:count]:
            assert all(isinstance(length, int) and length >= 0 for shape in arrays.values() for length in shape)

    # --- sums --------------------------------------------------------------------------------------------------------

    def test_sums_have_the_same_bits_on_all_ranks(self, world: int) -> None:
        for dtype in (torch.float32, torch.float64):
            first, *others = self.sum_buckets(world, dtype=dtype)
            for index, other in enumerate(others, 1):
                _check_same_bits(first, other, f"rank {index} gets another sum than rank 0")

    def test_sums_are_near_the_exact_ones(self, world: int, scatters: bool) -> None:
        """Check that the mean of many sums is near the exact sum; scattered ranges of all ranks are joined first."""
        totals = self.sum_buckets(world, steps=ROUNDS, constant=True, scatters=scatters)
        for number, layout in enumerate(ranks.BUCKETS):
            of_ranks = [
                sum((step[number].double() for step in of_rank), torch.zeros(())) / ROUNDS for of_rank in totals
            ]
            mean = torch.cat(of_ranks) if scatters else of_ranks[0]
            assert mean.shape == (layout.size,), f"a sum of {layout.size} elements has the shape {tuple(mean.shape)}"
            true = ranks.compute_exact(layout, number, 0, world)
            inside = torch.cat([torch.arange(slot.offset, slot.offset + slot.size) for slot in layout.slots])
            away = float((mean - true)[inside].norm() / true.norm())
            assert away <= self.tolerance, (
                f"the mean of {ROUNDS} sums is {away:.2g} of its norm away; tolerance={self.tolerance:.2g}"
            )

    @pytest.mark.parametrize("spoilt", [math.inf, math.nan])
    def test_a_sum_of_what_is_not_finite_is_not_finite(self, world: int, scatters: bool, spoilt: float) -> None:
        """Check that a bucket with inf or nan has a sum that is not finite, or the step would not be skipped."""
        of_ranks = self.sum_buckets(world, steps=1, scatters=scatters, spoilt=spoilt)
        for number in range(len(ranks.BUCKETS)):
            totals = [step[number] for (step,) in of_ranks]
            flags = [not bool(total.isfinite().all()) for total in totals]
            assert any(flags) if scatters else all(flags), (
                f"a gradient is {spoilt}, and the sum of its bucket is finite"
            )

    def test_waiting_later_changes_no_bit(self, world: int, scatters: bool) -> None:
        """Check that buckets in flight together get the bits that each gets alone."""
        early = self.sum_buckets(world, late=False, scatters=scatters)
        _check_same_bits(early, self.sum_buckets(world, scatters=scatters), "a sum depends on when it is waited for")

    def test_a_second_run_has_the_same_bits(self, world: int) -> None:
        _check_same_bits(
            self.sum_buckets(world), self.sum_buckets(world), "the same gradients have another sum the second time"
        )

    # --- kept arrays -------------------------------------------------------------------------------------------------

    def test_nothing_but_kept_arrays_is_remembered(self, world: int, scatters: bool) -> None:
        """Check that a reduction rebuilt between steps from the kept arrays continues bit for bit."""
        straight = self.sum_buckets(world, steps=2 * HALF, scatters=scatters)
        resumed = self.sum_buckets(world, steps=2 * HALF, scatters=scatters, handover=HALF)
        _check_same_bits(straight, resumed, "kept arrays are not all that it remembers")

    def test_a_resume_changes_no_bit(self, layout: str, tmp_path: Path) -> None:
        """Check that a resumed run has the losses and weights of an uninterrupted one, and that replicas stay equal."""
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
            _check_same_weights(weights, others, "of the resumed run differ")
        pieces: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        for _, weights, _ in straight:
            for name, offset, local in weights:
                assert torch.equal(pieces.setdefault((name, offset), local), local), f"{name} differs between replicas"

    def run_training(self, run_dir: Path, *words: str) -> list[Any]:
        """Train on two ranks, and return each rank's (records, weights, names of arrays of this layout alone)."""
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
