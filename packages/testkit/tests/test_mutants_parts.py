"""Conformance suites of the other parts, run on broken parts: each fault is detected by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline_testkit.mutants import Mutant, assert_found, assert_only_its_behaviour, judge

pytestmark = pytest.mark.usefixtures("broken_parts")

EPOCH = "test_epoch_reads_all_data_once"
LINES = """
def read_back(self, directory):
    rows = (directory / "lines.txt").read_text().splitlines()
    return [(int(step), float(loss)) for step, loss in map(str.split, rows)]
"""
SAYS = "test_seam_functions_match_the_calls_of_their_nodes"
CUT = "test_tp_cp_and_pp_match_one_rank"
CARRIES = "test_wrapped_comm_returns_the_results_of_the_bare_comm"
VARIABLES = "test_environment_variables_are_valid_and_repeatable"
TWO = "layouts = (2,)"
WORLD = "worlds = (2,)"
NEAR = "test_mean_of_sums_is_near_the_exact_sum"
LOSSY = "tolerance = 1.0"

SUITES = {
    "DataSourceSuite": [
        Mutant("data=repeats", EPOCH, "are read twice", "epochs"),
        Mutant("data=leaves-out", EPOCH, "in no sample of an epoch", "epochs"),
        Mutant("data=no-length", "test_count_samples_returns_a_positive_number_or_none", "TypeError"),
        Mutant("data=call-order", "test_sample_depends_only_on_its_number", "assert"),
        Mutant(
            "data=ignores-split",
            "test_validation_data_is_not_trained_on",
            "are in training and validation samples",
            "disjoint",
        ),
        Mutant("data=one-fingerprint", "test_fingerprint_changes_with_the_samples", "the fingerprint does not"),
        Mutant("data=per-process", "test_every_process_reads_equal_samples", "assert"),
        Mutant("data=off-after-resume", "test_reader_restarts_at_any_sample", "returned samples .* expected"),
        Mutant("data=differs-by-width", "test_readers_of_every_width_split_each_batch", "returned samples .* expected"),
        Mutant(
            "data=forgets-masks", "test_reader_returns_the_samples_of_the_source", "samples .*: loss_mask of the batch"
        ),
        Mutant("data=reads-after-close", "test_closed_reader_stops_reading", "batches after `close`|DID NOT RAISE"),
        Mutant("data=fills-too-early", "test_batch_is_unchanged_until_the_next_is_taken", "samples .* of the batch is"),
        Mutant("data=validates-by-rank", "test_validation_samples_are_equal_for_every_width", "validate on"),
        Mutant("data=too-short", "test_samples_have_the_shapes_and_types_of_the_contract", "T[+]1 = 33"),
    ],
    "CallbackSuite": [
        Mutant("callback=meddles", "test_run_is_bit_identical_without_the_callback", "assert", "watches"),
        Mutant("callback=forgets-state", "test_resumed_run_with_the_callback_is_bit_identical", "assert"),
        Mutant("callback=forgets-arrays", "test_resumed_run_with_the_callback_is_bit_identical", "assert"),
        Mutant(
            "callback=own-metrics",
            "test_run_with_the_callback_matches_one_process",
            "metrics must be equal on all ranks",
        ),
        Mutant("callback=says-whole", "test_run_with_the_callback_matches_one_process", "has no box for|assert"),
        Mutant("callback=asks-on-error", "test_on_error_runs_no_collectives", "must not run collectives"),
        Mutant(
            "callback=leaves-others", "test_may_drop_returns_only_arrays_it_was_given", "arrays that it was not given"
        ),
        Mutant("callback=halves-traffic", CARRIES, "all_reduce of the wrapped Comm returns"),
        Mutant("callback=swaps-ranks", CARRIES, "index of the wrapped Comm"),
        Mutant("callback=sets-variables", VARIABLES, "sets variables in os.environ"),
        Mutant("callback=says-numbers", VARIABLES, "must be a str, and is 100"),
        Mutant("callback=needs-its-state", "test_callback_can_be_added_and_removed_at_a_resume", "not seen every step"),
    ],
    "HealthCheckSuite": [
        Mutant("health=counts-itself", "test_response_depends_only_on_agreed_verdicts", "returns different responses"),
        Mutant("health=remembers", "test_response_depends_only_on_agreed_verdicts", "returns different responses"),
        Mutant("health=gathers", "test_check_runs_collectives_only_in_collective", "must not run collectives"),
        Mutant("health=cries", "test_check_works_in_a_resumed_run", "health=cries failed"),
        Mutant("health=jumpy", "test_healthy_run_gets_no_warning", "verdict on a healthy run"),
        Mutant(
            "health=forgetful", "test_check_restored_from_state_gives_equal_verdicts", "returns other verdicts|assert"
        ),
        Mutant("health=chatty", "test_check_runs_collectives_only_in_collective", "must not run collectives"),
        Mutant("health=blind", "test_check_catches_the_fault", "not-finite at step 100 is not reported", "not-finite"),
        Mutant("health=tidy", "test_check_does_not_change_records", "assert"),
        Mutant("health=proud", "test_unusual_records_raise_no_error", "NoneType"),
    ],
    "ModelEditSuite": [
        Mutant("in_place=on", "test_edit_is_pure", "the edit changed its inputs"),
        Mutant("claims_nothing=on", "test_claims_cover_exactly_the_changed_nodes", "changed and not claimed"),
        Mutant("no_init=on", "test_every_array_has_an_init", "no Init for parameter"),
        Mutant("dead_pattern=on", "test_every_pattern_of_the_plan_matches_an_array", "w_inn"),
        Mutant("own_lanes=on", "test_edited_model_matches_one_process", "expected", "", "own_lanes.fold=2", TWO),
        Mutant("boasts=on", SAYS, "window=3"),
        Mutant("swaps_attention=on", SAYS, "blocks.0.attention.attention: the node states no call"),
        Mutant("own_tokens=on", CUT, "loss of step 0 is", "", more="axes = ('cp',)"),
        Mutant("config_sizes=on", CUT, "unflatten", "", more="axes = ('tp',)"),
        Mutant("undeclared_partial=on", CUT, "gradient .*gain", "", more="axes = ('tp',)"),
        Mutant(
            "idle=on", "test_every_parameter_gets_a_gradient", "zero gradients in all steps: blocks.0.feed_forward.gain"
        ),
        Mutant("remembers=on", CUT, "loss of step 0 is", "", more="axes = ('pp',)"),
        Mutant("shifts=on", "test_cached_decoding_matches_a_full_forward", "logits of cached decoding"),
        Mutant("dice=on", "test_edit_is_pure", "another result on the second call"),
        Mutant("heavy=on", "test_edit_is_torch_free_and_equal_in_every_process", "torch is imported"),
    ],
    "TrackerSuite": [
        Mutant("track=needs-mfu", "test_unusual_records_raise_no_error", "NoneType"),
        Mutant("track=drops", "test_every_record_is_stored_once_in_order", "assert", "keeps", more=LINES),
        Mutant("track=appends", "test_abandoned_steps_are_removed", "assert", "resumes", more=LINES),
        Mutant("track=littering", "test_tracker_writes_only_into_the_run_directory", "assert"),
        Mutant("track=scaling", "test_tracker_does_not_change_records", "changed a step record"),
    ],
    "PrecisionSuite": [
        Mutant("precision=no-bias", "test_linear_matches_a_float64_matmul", "differs from float64"),
        Mutant("precision=crooked-gradient", "test_linear_gradients_match_a_float64_matmul", "gradient of w"),
        Mutant("precision=scribbles", "test_linear_does_not_change_its_inputs", "assert"),
        Mutant("precision=low-masters", "test_master_weights_have_at_least_float32", "assert"),
        Mutant("precision=coarse", "test_linear_is_as_exact_as_the_compute_dtype", "differs from float64", "faithful"),
        Mutant(
            "precision=scale-forgets",
            "test_precision_restored_from_state_has_equal_scales",
            "another loss scale",
            "scale",
        ),
        Mutant("precision=scale-grows", "test_scale_falls_after_steps_that_are_not_finite", "assert", "scale"),
        Mutant("precision=scale-ignored", "test_scale_falls_after_steps_that_are_not_finite", "assert", "scale"),
    ],
    "GradientsSuite": [
        Mutant("gradients=apart", "test_sums_are_bit_identical_on_all_ranks", "rank 1 has other bits of a sum"),
        Mutant("gradients=averages-ranks", NEAR, "of its norm from the exact sum"),
        Mutant("gradients=wrong-range", NEAR, "of its norm from the exact sum"),
        Mutant(
            "gradients=one-scratch", "test_sums_in_flight_together_change_no_bit", "other buckets start before its wait"
        ),
        Mutant(
            "gradients=forgets", "test_state_arrays_are_the_complete_state", "outside of its state arrays", more=LOSSY
        ),
        Mutant(
            "gradients=grows", "test_state_arrays_depend_only_on_the_layout", "returns other arrays on a second call"
        ),
        Mutant(
            "gradients=dice", "test_repeated_sums_are_bit_identical", "a second sum of the same gradients", more=LOSSY
        ),
        Mutant(
            "gradients=silent",
            "test_lossy_reduction_declares_layout_dependence",
            "needs Part.layout_dependent",
            more=LOSSY,
        ),
        Mutant("gradients=negative", "test_count_sent_and_count_state_are_upper_bounds", "count_sent returns -1 bytes"),
        Mutant("gradients=gathers-all", "test_count_sent_and_count_state_are_upper_bounds", "count_sent returns"),
        Mutant("gradients=swallows", "test_sum_with_inf_or_nan_is_not_finite", "the sum of its bucket is finite"),
        Mutant("gradients=hoards", "test_count_sent_and_count_state_are_upper_bounds", "count_state returns 0 numbers"),
    ],
    "OptimizerSuite": [
        Mutant("optimizer=late-state", "test_state_exists_before_the_first_step", "are on no rank", more=WORLD),
        Mutant("optimizer=no-counters", "test_resumed_optimizer_is_bit_identical", "assert", more=WORLD),
        Mutant("optimizer=copies", "test_resumed_optimizer_is_bit_identical", "assert", more=WORLD),
        Mutant("optimizer=drifts", "test_learning_rate_0_changes_no_weight", "are not bit-identical"),
        Mutant("optimizer=careless", "test_may_drop_returns_no_array_of_an_unknown_state", "does not have", more=WORLD),
        Mutant("optimizer=local-norm", "test_weights_and_state_match_one_process", "other bits|expected", more=WORLD),
    ],
    "ScheduleSuite": [
        Mutant("schedule=counts-calls", "test_factor_depends_only_on_the_step", "assert"),
        Mutant("schedule=too-high", "test_factors_are_between_0_and_1", "the factor is 1.5 at step"),
        Mutant("schedule=from-nothing", "test_factor_rises_to_1_during_warmup", "assert"),
        Mutant("schedule=with-torch", "test_schedule_is_built_without_torch", "torch is imported"),
    ],
    "SimulatorSuite": [
        Mutant("simulator=loses-time", "test_every_second_is_counted_once", "the accounts sum to"),
        Mutant("simulator=remembers-its-dice", "test_result_depends_only_on_the_job", "has another result"),
        Mutant("simulator=hopeful", "test_average_matches_the_closed_form", "the mean ETTR is"),
        Mutant("simulator=unshaken", "test_more_faults_lower_the_ettr", "four times the faults"),
    ],
}
ALL = [(suite, mutant) for suite, mutants in SUITES.items() for mutant in mutants]


@pytest.mark.parametrize(("suite", "mutant"), ALL, ids=str)
def test_suite_catches_mutant(suite: str, mutant: Mutant, tmp_path: Path) -> None:
    assert_found(mutant, suite, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(("suite", "mutant"), ALL, ids=str)
def test_mutant_fails_no_other_part_suite_test(suite: str, mutant: Mutant, tmp_path: Path) -> None:
    assert_only_its_behaviour(mutant, suite, tmp_path)


def test_factor_initialized_at_zero_passes(tmp_path: Path) -> None:
    """Check that a correct factor passes, although its first gradient is exactly 0 because its partner is 0."""
    result = judge(
        Mutant("low_rank=on", "", "", ""), "ModelEditSuite", tmp_path, "test_every_parameter_gets_a_gradient", CUT
    )
    assert result.passed == 4, result.failed
