"""Conformance suites, run on the toy parts of the kit."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline_testkit import (
    CallbackSuite,
    CheckpointerSuite,
    DataSourceSuite,
    HealthCheckSuite,
    ModelEditSuite,
    StrategySuite,
    TrackerSuite,
    as_installed,
    waive,
)
from gangline_testkit.scenarios import RunLayout

FEW = ("batch.global_size=4",)  # samples: one for each of four ranks, or four microbatches on one rank


@pytest.fixture(scope="module", autouse=True)
def toys():
    with as_installed("gangline-toys", "gangline_testkit.toys.plugin"):
        yield


class TestRows(StrategySuite):
    choice = "parallel=rows"
    settings = FEW
    layouts = (RunLayout(1), RunLayout(2), RunLayout(4))
    can = {"exact", "exact tied"}


class TestFiles(CheckpointerSuite):
    choice = "checkpoint=files"
    can = {"reshard", "atomic", "verify", "retention"}


class TestNumbers(DataSourceSuite):
    choice = "data=numbers"
    can = {"epochs", "disjoint", "reads"}


class TestApart(StrategySuite):
    """Strategy whose replicas differ; checkpoints, evaluations and text samples use the first replica."""

    choice = "parallel=apart"
    layouts = (RunLayout(2),)
    test_traffic_is_marked_with_its_purpose = waive("it sends no gradients")
    test_clip_measures_or_refuses_changed_gradients = waive("each replica clips by its own norm")


class TestPrevious(CallbackSuite):
    choice = "callback=previous"
    can = {"watches"}


class TestNan(HealthCheckSuite):
    choice = "health=nan"
    can = {"not-finite"}


class TestLanes(ModelEditSuite):
    choice = "lanes=on"
    settings = FEW


class TestLanesOnAFold(ModelEditSuite):
    choice = "lanes=on"
    settings = (*FEW, "lanes.fold=2", "model.tied=true")


class TestLines(TrackerSuite):
    choice = "track=lines"
    can = {"keeps", "resumes"}

    def read_back(self, directory: Path) -> list[tuple[int, float]]:
        lines = (directory / "lines.txt").read_text().splitlines()
        return [(int(step), float(loss)) for step, loss in map(str.split, lines)]
