"""Checkpointer conformance suite, run on broken checkpointers: each fault is detected by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline_testkit.mutants import Mutant, assert_found, assert_only_its_behaviour

pytestmark = pytest.mark.usefixtures("broken_parts")

SAME = "test_same_layout_loads_every_bit"

MUTANTS = [
    Mutant("checkpoint=drops-optimizer", SAME, "does not have the array optimizer/"),
    Mutant("checkpoint=ignores-offsets", "test_other_layout_loads_every_bit", "loaded other values", "reshard"),
    Mutant("checkpoint=lazy", SAME, "loaded other values than were saved"),
    Mutant("checkpoint=visible-too-soon", SAME, "lacks the checkpoint"),
    Mutant("checkpoint=settles-early", SAME, "SETTLED before `handle.visible` is done"),
    Mutant(
        "checkpoint=commits-early", "test_kill_before_any_file_change_leaves_complete_checkpoints", "damaged", "atomic"
    ),
    Mutant("checkpoint=overwrites", "test_checkpoint_is_never_overwritten", "second save"),
    Mutant("checkpoint=unchecked", "test_flipped_bits_are_detected", "is not detected: (wrong|ValueError)", "verify"),
    Mutant("checkpoint=newest", "test_latest_skips_an_abandoned_branch", "step-00000003"),
    Mutant("checkpoint=forgets-document", "test_document_is_read_back_unchanged", "assert"),
    Mutant(
        "checkpoint=hides-full-disk", "test_full_disk_fails_only_the_current_save", "expected SaveFailed on both ranks"
    ),
    Mutant("checkpoint=keeps-damage-to-itself", "test_lost_file_is_reported_on_all_ranks", "with .*npy deleted"),
    Mutant(
        "checkpoint=counts-unreadable",
        "test_keep_last_does_not_count_a_damaged_checkpoint",
        "counted the unreadable",
        "retention",
    ),
    Mutant("checkpoint=trusts-names", "test_renamed_checkpoint_is_damaged_or_not_listed", "renamed to step-00000007"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_suite_catches_mutant(mutant: Mutant, tmp_path: Path) -> None:
    assert_found(mutant, "CheckpointerSuite", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_fails_no_other_part_suite_test(mutant: Mutant, tmp_path: Path) -> None:
    assert_only_its_behaviour(mutant, "CheckpointerSuite", tmp_path)
