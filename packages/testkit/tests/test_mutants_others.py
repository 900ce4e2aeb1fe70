"""Other parts that are wrong in one way each: their suites find each of them by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline_testkit.mutants import Mutant, assert_found, assert_only_its_behaviour, judge

pytestmark = pytest.mark.usefixtures("broken_parts")

EPOCH = "test_an_epoch_repeats_nothing_and_leaves_nothing_out"
LINES = """
def read_back(self, directory):
    rows = (directory / "lines.txt").read_text().splitlines()
    return [(int(step), float(loss)) for step, loss in map(str.split, rows)]
"""
SAYS = "test_functions_compute_what_their_nodes_say"
CUT = "test_layouts_that_cut_the_model_agree"
CARRIES = "test_what_it_wraps_around_a_comm_carries_the_same"
VARIABLES = "test_variables_are_words_for_the_environment"
TWO = "layouts = (2,)"
WORLD = "worlds = (2,)"
NEAR = "test_sums_are_near_the_exact_ones"
LOSSY = "tolerance = 1.0"

SUITES = {
    "DataSourceSuite": [
        Mutant("data=repeats", EPOCH, "come twice", "epochs"),
        Mutant("data=leaves-out", EPOCH, "never shown", "epochs"),
        Mutant("data=no-length", "test_length_is_a_number_of_samples_or_none", "TypeError"),
        Mutant("data=call-order", "test_a_sample_depends_on_its_number_alone", "assert"),
        Mutant("data=ignores-split", "test_validation_is_never_trained_on", "trained on", "disjoint"),
        Mutant("data=one-fingerprint", "test_fingerprint_changes_with_the_samples", "same fingerprint"),
        Mutant("data=per-process", "test_every_process_sees_the_same_samples", "assert"),
        Mutant("data=off-after-resume", "test_a_reader_goes_on_anywhere", "samples .* are wanted"),
        Mutant("data=differs-by-width", "test_readers_of_every_width_share_each_batch", "samples .* are wanted"),
        Mutant("data=forgets-masks", "test_a_reader_gives_the_samples_themselves", "loss_mask of samples"),
        Mutant("data=reads-after-close", "test_a_closed_reader_reads_nothing_more", "read after `close`|DID NOT RAISE"),
        Mutant("data=fills-too-early", "test_what_a_reader_gave_stays_until_the_next", "of samples"),
        Mutant("data=validates-by-rank", "test_held_out_samples_are_the_same_for_every_width", "validate on"),
        Mutant("data=too-short", "test_samples_have_the_shapes_and_types_of_the_contract", "T[+]1 = 33"),
    ],
    "CallbackSuite": [
        Mutant("callback=meddles", "test_the_run_is_as_without_it", "assert", "watches"),
        Mutant("callback=forgets-state", "test_a_checkpoint_in_the_middle_changes_no_bit", "assert"),
        Mutant("callback=forgets-arrays", "test_a_checkpoint_in_the_middle_changes_no_bit", "assert"),
        Mutant("callback=own-metrics", "test_layouts_agree", "metrics must be equal on all ranks"),
        Mutant("callback=says-whole", "test_layouts_agree", "knows nothing of|assert"),
        Mutant("callback=asks-on-error", "test_no_collectives_on_an_error", "where there may be none"),
        Mutant("callback=leaves-others", "test_leaves_over_some_of_the_arrays_it_is_asked_about", "not asked about"),
        Mutant("callback=halves-traffic", CARRIES, "all_reduce gives"),
        Mutant("callback=swaps-ranks", CARRIES, "index of"),
        Mutant("callback=sets-variables", VARIABLES, "sets variables itself"),
        Mutant("callback=says-numbers", VARIABLES, "100, no text"),
        Mutant("callback=needs-its-state", "test_begins_where_a_checkpoint_has_nothing_of_it", "not seen every step"),
    ],
    "HealthCheckSuite": [
        Mutant("health=counts-itself", "test_an_answer_depends_on_what_was_agreed_alone", "answers differently"),
        Mutant("health=remembers", "test_an_answer_depends_on_what_was_agreed_alone", "answers differently"),
        Mutant("health=gathers", "test_no_collectives_outside_of_collective", "where there may be none"),
        Mutant("health=cries", "test_lives_in_a_run_that_is_killed_and_goes_on", "health=cries failed"),
        Mutant("health=jumpy", "test_quiet_where_nothing_is_wrong", "on a healthy run"),
        Mutant("health=forgetful", "test_state_goes_through_a_checkpoint", "speaks differently|assert"),
        Mutant("health=chatty", "test_no_collectives_outside_of_collective", "where there may be none"),
        Mutant("health=blind", "test_catches_the_fault", "not-finite at step 100 is not caught", "not-finite"),
        Mutant("health=tidy", "test_records_are_left_as_they_are", "assert"),
        Mutant("health=proud", "test_strange_records_raise_nothing", "NoneType"),
    ],
    "ModelEditSuite": [
        Mutant("in_place=on", "test_pure", "changed what it was given"),
        Mutant("claims_nothing=on", "test_claims_what_it_changed", "changed and not claimed"),
        Mutant("no_init=on", "test_every_array_has_an_init", "no Init for parameter"),
        Mutant("dead_pattern=on", "test_every_pattern_of_the_plan_matches", "w_inn"),
        Mutant("own_lanes=on", "test_layouts_agree", "expected", "", "own_lanes.fold=2", TWO),
        Mutant("boasts=on", SAYS, "window=3"),
        Mutant("swaps_attention=on", SAYS, "blocks.0.attention.attention: its node says nothing"),
        Mutant("own_tokens=on", CUT, "loss of step 0 is", "", more="axes = ('cp',)"),
        Mutant("config_sizes=on", CUT, "unflatten", "", more="axes = ('tp',)"),
        Mutant("undeclared_partial=on", CUT, "gradient .*gain", "", more="axes = ('tp',)"),
        Mutant("idle=on", "test_every_parameter_learns", "no gradient reaches blocks.0.feed_forward.gain"),
        Mutant("remembers=on", CUT, "loss of step 0 is", "", more="axes = ('pp',)"),
        Mutant("shifts=on", "test_what_is_kept_between_tokens_changes_no_text", "logits of the next"),
        Mutant("dice=on", "test_pure", "something else the second time"),
        Mutant("heavy=on", "test_torch_free_and_the_same_in_every_process", "torch is imported"),
    ],
    "TrackerSuite": [
        Mutant("track=needs-mfu", "test_strange_records_raise_nothing", "NoneType"),
        Mutant("track=drops", "test_every_record_is_kept", "assert", "keeps", more=LINES),
        Mutant("track=appends", "test_an_abandoned_branch_is_gone", "assert", "resumes", more=LINES),
        Mutant("track=littering", "test_writes_only_into_the_run_directory", "assert"),
        Mutant("track=scaling", "test_records_are_left_as_they_are", "changed a record"),
    ],
    "PrecisionSuite": [
        Mutant("precision=no-bias", "test_linear_is_the_product", "of its norm away"),
        Mutant("precision=crooked-gradient", "test_linear_has_the_gradients_of_the_product", "gradient of w"),
        Mutant("precision=scribbles", "test_linear_leaves_its_inputs_alone", "assert"),
        Mutant("precision=low-masters", "test_masters_have_at_least_float32", "assert"),
        Mutant("precision=coarse", "test_linear_is_as_exact_as_its_dtype", "of its norm away", "faithful"),
        Mutant("precision=scale-forgets", "test_state_goes_through_a_checkpoint", "another scale", "scale"),
        Mutant("precision=scale-grows", "test_the_scale_falls_where_steps_are_not_finite", "assert", "scale"),
        Mutant("precision=scale-ignored", "test_the_scale_falls_where_steps_are_not_finite", "assert", "scale"),
    ],
    "GradientsSuite": [
        Mutant("gradients=apart", "test_sums_have_the_same_bits_on_all_ranks", "rank 1 gets another sum"),
        Mutant("gradients=averages-ranks", NEAR, "of its norm away"),
        Mutant("gradients=wrong-range", NEAR, "of its norm away"),
        Mutant("gradients=one-scratch", "test_waiting_later_changes_no_bit", "when it is waited for"),
        Mutant("gradients=forgets", "test_nothing_but_kept_arrays_is_remembered", "are not all", more=LOSSY),
        Mutant("gradients=grows", "test_arrays_are_a_function_of_the_layout", "other arrays the second time"),
        Mutant("gradients=dice", "test_a_second_run_has_the_same_bits", "another sum the second time", more=LOSSY),
        Mutant("gradients=silent", "test_says_what_it_loses", "Part.layout_dependent does not say", more=LOSSY),
        Mutant("gradients=negative", "test_says_bytes_and_numbers", "count_sent says -1 bytes"),
        Mutant("gradients=gathers-all", "test_says_bytes_and_numbers", "count_sent says"),
        Mutant(
            "gradients=swallows", "test_a_sum_of_what_is_not_finite_is_not_finite", "the sum of its bucket is finite"
        ),
        Mutant("gradients=hoards", "test_says_bytes_and_numbers", "count_kept says 0 numbers"),
    ],
    "OptimizerSuite": [
        Mutant("optimizer=late-state", "test_state_is_there_before_the_first_step", "held by no rank", more=WORLD),
        Mutant("optimizer=no-counters", "test_a_checkpoint_in_the_middle_changes_no_bit", "assert", more=WORLD),
        Mutant("optimizer=copies", "test_a_checkpoint_in_the_middle_changes_no_bit", "assert", more=WORLD),
        Mutant("optimizer=drifts", "test_a_rate_of_nothing_changes_no_weight", "differ in their bits"),
        Mutant("optimizer=careless", "test_an_unknown_array_of_a_checkpoint_is_refused", "never had", more=WORLD),
        Mutant("optimizer=local-norm", "test_layouts_agree", "other bits|expected", more=WORLD),
    ],
    "ScheduleSuite": [
        Mutant("schedule=counts-calls", "test_pure", "assert"),
        Mutant("schedule=too-high", "test_factors_lie_between_nothing_and_one", "1.5 at step"),
        Mutant("schedule=from-nothing", "test_warm_up", "assert"),
        Mutant("schedule=with-torch", "test_builds_without_torch", "torch is imported"),
    ],
    "SimulatorSuite": [
        Mutant("simulator=loses-time", "test_every_second_is_in_one_account", "s of"),
        Mutant("simulator=remembers-its-dice", "test_a_course_is_a_function_of_the_job", "comes to something else"),
        Mutant("simulator=hopeful", "test_on_average_it_comes_to_the_closed_form", "an ETTR of"),
        Mutant("simulator=unshaken", "test_more_faults_cost_more", "four times the faults"),
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
    """Its partner's first gradient is zero to the last bit."""
    result = judge(Mutant("low_rank=on", "", "", ""), "ModelEditSuite", tmp_path, "test_every_parameter_learns", CUT)
    assert result.passed == 4, result.failed
