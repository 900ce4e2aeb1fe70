"""Checkpointers that are wrong in one way each: the suite finds each of them by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline_testkit.mutants import Mutant, assert_found, assert_only_its_behaviour

pytestmark = pytest.mark.usefixtures("broken_parts")

SAME = "test_the_same_layout_gets_back_every_bit"

MUTANTS = [
    Mutant("checkpoint=drops-optimizer", SAME, "does not have optimizer/"),
    Mutant("checkpoint=ignores-offsets", "test_another_layout_gets_back_every_bit", "got other values", "reshard"),
    Mutant("checkpoint=lazy", SAME, "got other values than were saved"),
    Mutant("checkpoint=visible-too-soon", SAME, "visible when it was not"),
    Mutant("checkpoint=settles-early", SAME, "settled before its checkpoint is visible"),
    Mutant("checkpoint=commits-early", "test_a_kill_leaves_whole_checkpoints_or_none", "damaged", "atomic"),
    Mutant("checkpoint=overwrites", "test_a_checkpoint_is_never_overwritten", "second save"),
    Mutant("checkpoint=unchecked", "test_every_flipped_byte_is_noticed", "flipped: (wrong|ValueError)", "verify"),
    Mutant("checkpoint=newest", "test_latest_is_never_of_an_abandoned_branch", "step-00000003"),
    Mutant("checkpoint=forgets-document", "test_the_document_comes_back", "assert"),
    Mutant("checkpoint=hides-full-disk", "test_a_full_disk_fails_the_save_alone", "instead of SaveFailed"),
    Mutant("checkpoint=keeps-damage-to-itself", "test_a_lost_file_is_damage_that_is_named", "without .*npy"),
    Mutant("checkpoint=counts-unreadable", "test_what_cannot_be_read_counts_for_nothing", "was counted", "retention"),
    Mutant("checkpoint=trusts-names", "test_under_another_name_it_is_no_checkpoint", "under the name of"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_suite_catches_mutant(mutant: Mutant, tmp_path: Path) -> None:
    assert_found(mutant, "CheckpointerSuite", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_fails_no_other_part_suite_test(mutant: Mutant, tmp_path: Path) -> None:
    assert_only_its_behaviour(mutant, "CheckpointerSuite", tmp_path)
