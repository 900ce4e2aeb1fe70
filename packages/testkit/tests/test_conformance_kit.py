"""Conformance kit: omitted tests, waivers with reasons, claims checked in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.config.schema import Run
from gangline.errors import UserError
from gangline.plugin.discovery import Offer
from gangline.plugin.parts import Part
from gangline.plugin.registry import installed
from gangline_testkit import LAYOUT, ScheduleSuite, TrackerSuite, as_installed, mark_capability, waive
from gangline_testkit.report import Result, find_suite, run_file

HEAD = "from gangline_testkit import *\n"


def suite(tmp_path: Path, text: str, *tests: str) -> Result:
    """Run the suite class `TestMine` in `text`; return its result."""
    path = tmp_path / f"test_{tmp_path.name}.py"
    path.write_text(HEAD + text)
    (result,) = run_file(path, tests=[f"TestMine::{test}" for test in tests])
    return result


OVERRIDES = """
class TestMine(ScheduleSuite):
    choice = "schedule=cosine"

    def test_factor_depends_only_on_the_step(self):
        pass
"""
DELETES = """
class TestMine(ScheduleSuite):
    choice = "schedule=cosine"
    test_factor_depends_only_on_the_step = None
"""
WAIVES = """
class TestMine(ScheduleSuite):
    choice = "schedule=cosine"
    test_factor_depends_only_on_the_step = waive("it follows the clock")
"""


@pytest.mark.parametrize("text", [OVERRIDES, DELETES], ids=["override", "delete"])
def test_omitted_standard_test_is_reported(text: str, tmp_path: Path) -> None:
    result = suite(tmp_path, text, "test_no_standard_test_is_overridden_or_deleted")
    assert "test_factor_depends_only_on_the_step" in result.failed["test_no_standard_test_is_overridden_or_deleted"]


def test_a_waived_test_shows_its_reason(tmp_path: Path) -> None:
    result = suite(tmp_path, WAIVES)
    assert not result.failed
    assert result.waived == ["test_factor_depends_only_on_the_step: it follows the clock"]
    assert not any(name.startswith("test_factor_depends_only_on_the_step") for name in result.failed)


def test_a_waiver_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        waive(" ")


def test_completeness_test_cannot_be_overridden() -> None:
    with pytest.raises(TypeError, match="must not override"):
        type(
            "TestMine",
            (ScheduleSuite,),
            {"test_no_standard_test_is_overridden_or_deleted": waive("no"), "__module__": "mine"},
        )


def test_unknown_claim_fails(tmp_path: Path) -> None:
    text = 'class TestMine(TrackerSuite):\n    choice = "track=jsonl"\n    can = {"keeeps"}\n'
    result = suite(tmp_path, text, "test_every_claim_is_known_to_the_suite")
    assert "unknown claims in `can`: keeeps" in result.failed["test_every_claim_is_known_to_the_suite"]


RECORDED = """
    def read_back(self, directory):
        from gangline.record import read_records
        return [(record["step"], record["loss"]) for record in read_records(directory / "metrics.jsonl")]
"""


@pytest.mark.parametrize(
    ("can", "text", "failed", "could"),
    [
        ('{"keeps", "resumes"}', RECORDED, set(), []),
        ("set()", RECORDED, set(), ["keeps", "resumes"]),
        ("set()", "", set(), []),
        ('{"keeps"}', "", {"test_every_record_is_stored_once_in_order"}, []),
    ],
    ids=["claimed and held", "held, not claimed", "neither", "claimed, not held"],
)
def test_failed_claims_and_unclaimed_capabilities_are_reported(
    can: str, text: str, failed: set, could: list, tmp_path: Path
) -> None:
    own = f'class TestMine(TrackerSuite):\n    choice = "track=jsonl"\n    can = {can}\n{text}'
    result = suite(tmp_path, own, "test_every_record_is_stored_once_in_order", "test_abandoned_steps_are_removed")
    assert set(result.failed) == failed
    assert sorted(result.could_claim) == could


def test_unclaimed_capability_gives_a_warning(tmp_path: Path) -> None:
    mine = type("TestMine", (TrackerSuite,), {"choice": "track=jsonl"})()
    mine.read_back = lambda directory: [(step, mine.losses[step]) for step in sorted(mine.losses)]
    from gangline_testkit.health import make_healthy

    mine.losses = {record.step: record.loss for record in make_healthy(20)}
    mine.live = lambda *args, **kwargs: None
    with pytest.warns(UserWarning, match='track=jsonl could claim "keeps"'):
        mine.test_every_record_is_stored_once_in_order(tmp_path)


def test_as_installed_raises_the_import_error(tmp_path: Path) -> None:
    (tmp_path / "no_such_import.py").write_text("import surely_not_installed_anywhere\n")
    with (
        pytest.raises(ModuleNotFoundError, match="surely_not_installed_anywhere"),
        as_installed("gangline-x", "no_such_import", path=tmp_path),
    ):
        pass


def test_every_group_has_its_suite() -> None:
    with as_installed("gangline-toys", "gangline_testkit.toys.plugin"):
        found = installed()
        suites = {
            group: find_suite(offer) for group in found.list_groups() for offer in found.get_offers(group).values()
        }
    assert suites["lanes"] == "gangline_testkit:ModelEditSuite"
    assert suites["model"] == "gangline_testkit:PartSuite"
    assert suites["checkpoint"] == "gangline_testkit:CheckpointerSuite"
    with pytest.raises(UserError):
        type("Missing", (ScheduleSuite,), {"choice": "schedule=absent"})().offer  # noqa: B018


@pytest.mark.parametrize(
    ("depends", "can", "passes"),
    [("", set(), False), ("by how a batch is cut", set(), True), ("by how a batch is cut", {"layout"}, False)],
    ids=["invariant", "layout-dependent", "invariant with these settings"],
)
def test_layout_dependence_must_be_declared(depends: str, can: set[str], passes: bool) -> None:
    class Mine:
        choice = "schedule=mine"
        offer = Offer(Part(name="mine", config=Run, build="a:b", summary="Mine", layout_dependent=depends), "", "", "")

        @mark_capability(LAYOUT)
        def test(self) -> None:
            raise AssertionError("loss of 2 ranks is 3.0, expected 2.0")

    Mine.can = can
    if passes:
        Mine().test()
        return
    with pytest.raises(AssertionError, match="expected") as failure:
        Mine().test()
    assert "Part.layout_dependent" in failure.value.__notes__[0]
