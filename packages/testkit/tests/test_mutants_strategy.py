"""Strategy conformance suite, run on broken strategies: each fault is detected by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline_testkit.mutants import Mutant, assert_found, assert_only_its_behaviour

pytestmark = pytest.mark.usefixtures("broken_parts")

TWO = "layouts = (RunLayout(2),)"
FOUR = "layouts = (RunLayout(4),)"

MUTANTS = [
    Mutant("parallel=averages", "test_gradients_match_one_process", "gradient .* expected", more=TWO),
    Mutant(
        "parallel=unmarked",
        "test_traffic_is_marked_with_its_purpose",
        "rank 0 marks 0 sent bytes as gradients",
        more=TWO,
    ),
    Mutant(
        "parallel=forgets-vectors", "test_gradients_match_one_process", "holds other bits of .*norm.weight", more=TWO
    ),
    Mutant("parallel=local-tokens", "test_gradients_match_one_process", "gradient .* expected", more=TWO),
    Mutant(
        "parallel=says-the-mean",
        "test_own_losses_add_up_to_the_loss_of_the_share",
        "sum of own_loss_sum of .* expected",
        more=TWO,
    ),
    Mutant("parallel=counts-twice", "test_gradient_norm_matches_one_process", "norm is .* expected", more=TWO),
    Mutant("parallel=steps-on-nan", "test_nonfinite_step_on_one_rank_is_reported_by_all", "counts as finite", more=TWO),
    Mutant(
        "parallel=shares-folds", "test_module_on_a_fold_matches_one_process", "gradient .*feed_forward.w_", more=TWO
    ),
    Mutant("parallel=stale", "test_weights_after_several_steps_match_one_process", "final array .* expected", more=TWO),
    Mutant("parallel=never-tells", "test_after_step_gets_values_reduced_over_all_ranks", "balance", more=TWO),
    Mutant(
        "parallel=misplaces",
        "test_shards_match_the_boxes_of_the_registry",
        r"rank \d: the registry has no box of model/.* at",
        more=TWO,
    ),
    Mutant(
        "parallel=arrival-order",
        "test_training_is_bit_identical_to_one_process",
        "are not bit-identical",
        "exact",
        more=FOUR,
    ),
    Mutant("parallel=evaluates-alone", "test_evaluated_loss_matches_one_process", "evaluated loss is", more=TWO),
    Mutant(
        "parallel=evaluates-in-training", "test_module_on_a_fold_matches_one_process", "evaluated loss is", more=TWO
    ),
    Mutant(
        "parallel=evaluates-by-share",
        "test_evaluation_is_bit_identical_to_one_process",
        "evaluated loss is",
        "exact",
        more=TWO,
    ),
    Mutant("parallel=repeats-matrices", "test_each_full_matrix_is_mapped_once", "the ranks mapped", more=TWO),
    Mutant("parallel=maps-pieces", "test_each_full_matrix_is_mapped_once", "are not bit-identical", more=TWO),
    Mutant(
        "parallel=maps-elsewhere",
        "test_each_full_matrix_is_mapped_once",
        "rank 1 mapped .* returns the owner 0",
        more=TWO,
    ),
    Mutant("parallel=forgets-a-share", "test_scores_match_one_process", "score of sample.* is 0.0, expected", more=TWO),
    Mutant("parallel=scores-backwards", "test_scores_match_one_process", "score of sample.* expected", more=TWO),
    Mutant("parallel=clips-vectors", "test_clip_scales_all_gradients_by_one_factor", "clipped gradient", more=TWO),
    Mutant(
        "parallel=clips-by-the-step",
        "test_clip_measures_or_refuses_changed_gradients",
        "norm of gradients times",
        more=TWO,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_suite_catches_mutant(mutant: Mutant, tmp_path: Path) -> None:
    assert_found(mutant, "StrategySuite", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_fails_no_other_part_suite_test(mutant: Mutant, tmp_path: Path) -> None:
    assert_only_its_behaviour(mutant, "StrategySuite", tmp_path)
