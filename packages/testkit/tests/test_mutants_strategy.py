"""Strategies that are wrong in one way each: the suite finds each of them by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline_testkit.mutants import Mutant, assert_found, assert_only_its_behaviour

pytestmark = pytest.mark.usefixtures("broken_parts")

TWO = "layouts = (RunLayout(2),)"
FOUR = "layouts = (RunLayout(4),)"

MUTANTS = [
    Mutant("parallel=averages", "test_gradients", "gradient .* expected", more=TWO),
    Mutant("parallel=unmarked", "test_traffic_is_marked", "rank 0 marks 0 bytes as gradients", more=TWO),
    Mutant("parallel=forgets-vectors", "test_gradients", "holds other bits of .*norm.weight", more=TWO),
    Mutant("parallel=local-tokens", "test_gradients", "gradient .* expected", more=TWO),
    Mutant(
        "parallel=says-the-mean", "test_each_rank_says_what_it_added_to_the_loss", "own loss of .* expected", more=TWO
    ),
    Mutant("parallel=counts-twice", "test_gradient_norm", "norm is .* expected", more=TWO),
    Mutant("parallel=steps-on-nan", "test_not_finite_on_one_rank_is_known_to_all", "counts as finite", more=TWO),
    Mutant("parallel=shares-folds", "test_a_module_on_a_fold", "gradient .*feed_forward.w_", more=TWO),
    Mutant("parallel=stale", "test_weights_after_several_steps", "weights .* expected", more=TWO),
    Mutant("parallel=never-tells", "test_modules_are_told_after_the_step", "balance", more=TWO),
    Mutant("parallel=misplaces", "test_shards_are_the_boxes_of_the_registry", r"rank \d: model/.* at", more=TWO),
    Mutant("parallel=arrival-order", "test_bit_identical_to_one_process", "differ in their bits", "exact", more=FOUR),
    Mutant("parallel=evaluates-alone", "test_evaluate", "evaluated loss is", more=TWO),
    Mutant("parallel=evaluates-in-training", "test_a_module_on_a_fold", "evaluated loss is", more=TWO),
    Mutant(
        "parallel=evaluates-by-share",
        "test_an_evaluation_is_bit_identical_to_one_process",
        "evaluated loss is",
        "exact",
        more=TWO,
    ),
    Mutant("parallel=repeats-matrices", "test_matrices_are_mapped_whole_and_once", "the ranks mapped", more=TWO),
    Mutant("parallel=maps-pieces", "test_matrices_are_mapped_whole_and_once", "differ in their bits", more=TWO),
    Mutant(
        "parallel=maps-elsewhere", "test_matrices_are_mapped_whole_and_once", "rank 1 mapped .* said to be 0", more=TWO
    ),
    Mutant("parallel=forgets-a-share", "test_score", "score of sample.* is 0.0, expected", more=TWO),
    Mutant("parallel=scores-backwards", "test_score", "score of sample.* expected", more=TWO),
    Mutant("parallel=clips-vectors", "test_clip_scales_all_gradients_alike", "clipped gradient", more=TWO),
    Mutant("parallel=clips-by-the-step", "test_clip_measures_changed_gradients", "norm of gradients times", more=TWO),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_suite_catches_mutant(mutant: Mutant, tmp_path: Path) -> None:
    assert_found(mutant, "StrategySuite", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_fails_no_other_part_suite_test(mutant: Mutant, tmp_path: Path) -> None:
    assert_only_its_behaviour(mutant, "StrategySuite", tmp_path)
