"""Requirements between parts, and groups that offer the parts of another group."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline import Part
from gangline.config.check import find_problems
from gangline.config.compose import compose
from gangline.config.schema import PartConfig
from gangline.config.serial import from_dict, to_dict
from gangline.errors import UserError
from gangline.plugin.registry import installed
from gangline_basics.parallel.config import Ddp
from gangline_testkit import OptimizerSuite, as_installed
from gangline_testkit.sessions import train_on_ranks

SMALL = ("recipe=tiny", "launch.processes=2")


@pytest.fixture(autouse=True, scope="module")
def method():
    with as_installed("gangline-method", "method_parts", path=Path(__file__).parent / "method"):
        yield


def found(*words: str) -> list[str]:
    (run,) = compose([*SMALL, *words])
    return [f"{problem.what} {problem.fix}" for problem in find_problems(run) if "needs" in problem.what]


def test_parts_with_all_requirements_have_no_problems():
    assert found("parallel=paired", "optimizer=paired", "callback=[paired]") == []


def test_missing_required_parts_are_named():
    assert found("parallel=paired") == [
        "parallel=paired needs optimizer=paired. To choose both:  optimizer=paired",
        "parallel=paired needs callback=paired. To choose both:  callback=[paired]",
    ]
    assert found("optimizer=paired", "callback=[profile,paired]") == [
        "optimizer=paired needs parallel=paired. To choose both:  parallel=paired"
    ]
    assert found("parallel=paired", "optimizer=paired", "callback=[profile]") == [
        "parallel=paired needs callback=paired. To choose both:  callback=[profile,paired]"
    ]


def test_requirements_of_nested_part_are_checked():
    assert found("parallel=around", "parallel/inner=needy") == [
        "parallel/inner=needy needs optimizer=paired. To choose both:  optimizer=paired"
    ]
    assert found("parallel=around", "parallel/inner=needy", "optimizer=paired") == [
        "optimizer=paired needs parallel=paired. To choose both:  parallel=paired"
    ]


def test_required_part_not_installed_is_reported():
    absent, unknown = found("callback=[absent]"), found("callback=[stray]")
    assert absent[0].startswith("callback=absent needs optimizer=absent. optimizer=absent is not available here.")
    assert "Installed choices for optimizer: " in absent[0]
    assert unknown[0].startswith("callback=stray needs weather=sun. there is no group 'weather'.")


def test_conformance_suite_selects_required_parts():
    suite = OptimizerSuite()
    suite.choice = "optimizer=paired"
    assert suite.chosen == ("parallel=paired", "optimizer=paired")
    assert suite.keep_chosen("parallel=ddp", "callback=[profile]") == ("callback=[profile]",)
    assert suite.make_job(2).mesh.size("dp_replicate") == 2
    suite.test_weights_and_state_match_one_process(2)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"needs": ("optimizer",)}, "group=name"), ({"views": {"inner": "parallel"}}, "missing in `opens`")],
    ids=["needs", "views"],
)
def test_part_with_invalid_declaration_is_refused(wrong, why):
    with pytest.raises(ValueError, match=why):
        Part(name="mine", config=PartConfig, build="a:b", summary="Mine", **wrong)


def test_view_offers_parts_of_viewed_group():
    (run,) = compose([*SMALL, "parallel=around", "parallel/inner=ddp", "parallel.inner.bucket_mb=0.5"])
    assert run.parallel.inner == Ddp(bucket_mb=0.5)
    assert from_dict(to_dict(run)) == run
    assert to_dict(run)["parts"]["parallel/inner"] == "ddp"
    assert "ddp" in installed().find_choices("parallel/inner")
    assert "around" not in installed().find_choices("parallel/inner")  # `around` itself opens this group
    with pytest.raises(UserError, match=r"parallel.inner.buckets_mb"):
        compose([*SMALL, "parallel=around", "parallel/inner=ddp", "parallel.inner.buckets_mb=0.5"])
    with pytest.raises(UserError, match="parallel/inner=dpd is not available"):
        compose([*SMALL, "parallel=around", "parallel/inner=dpd"])


def test_run_with_view_trains(tmp_path):
    words = ("parallel=around", "parallel/inner=ddp", "run.steps=2")
    assert train_on_ranks(2, tmp_path / "run", *words) == 0
