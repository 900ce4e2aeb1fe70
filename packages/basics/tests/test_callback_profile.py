"""`callback=profile`: profiler traces of selected steps and ranks, in the format that trace viewers read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from gangline.config.check import check
from gangline.errors import UserError
from gangline.train.callbacks import call_each
from gangline.train.loop import step
from gangline.train.report import Clock
from gangline_testkit.runs import build_small_run
from gangline_testkit.sessions import open_session, train_on_ranks, train_session

PHASES = {"data", "forward_backward", "optimizer"}


def ranges(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the complete events (`ph` is X) of a trace, by name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if event["ph"] == "X":
            found.setdefault(event["name"], []).append(event)
    return found


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_selected_steps_and_ranks_are_traced_with_phases(tmp_path):
    words = ("callback=profile", "callback.profile.steps=[4,2,5]", "callback.profile.ranks=[1]", "run.steps=6")
    train_on_ranks(2, tmp_path / "out", *words, "parallel=ddp")
    names = ["step-00000002.rank-00001.pt.trace.json.gz", "steps-00000004-00000005.rank-00001.pt.trace.json.gz"]
    assert sorted(path.name for path in (tmp_path / "out" / "profile").iterdir()) == names
    for name, steps in zip(names, ([2], [4, 5]), strict=True):
        found = ranges(tmp_path / "out" / "profile" / name)
        assert {key for key in found if key.startswith("ProfilerStep")} == {f"ProfilerStep#{n}" for n in steps}
        for number in steps:
            (whole,) = found[f"ProfilerStep#{number}"]
            for phase in PHASES:
                assert sum(inside(one, whole) for one in found[phase]) == 1, f"{phase} of step {number}"
        matmuls = found["aten::mm"]
        assert any(inside(matmul, phase) for matmul in matmuls for phase in found["forward_backward"])
        text = gzip.decompress((tmp_path / "out" / "profile" / name).read_bytes()).decode()
        assert '"[memory]"' in text, "memory of the operators"


def test_open_trace_is_written_on_rollback_or_error(tmp_path):
    """Check also a profiler that was prepared but recorded no step: it stops, and leaves no file."""
    s = open_session(tmp_path / "out", "callback=profile", "callback.profile.steps=[2,3,4,9]")
    mine = s.callbacks["profile"]
    profile = tmp_path / "out" / "profile"
    for _ in range(3):
        call_each(s, "before_step", s.step + 1)
        call_each(s, "after_step", step(s, Clock())[0], True)
    mine.before_step(1)  # rollback to the first step
    assert [path.name[:25] for path in profile.iterdir()] == ["steps-00000002-00000003.r"], "what was taken"
    assert {"ProfilerStep#2", "ProfilerStep#3"} == {key for key in ranges(next(profile.iterdir())) if "Step#" in key}
    mine.before_step(8)
    mine.on_error(RuntimeError("of all things"))
    assert len(list(profile.iterdir())) == 1
    mine.before_step(9)
    mine.on_error(RuntimeError("of all things"))
    assert sorted(path.name[:9] for path in profile.iterdir()) == ["step-0000", "steps-000"]


def test_resumed_run_traces_remaining_steps(tmp_path):
    words = ("callback=profile", "callback.profile.steps=[3,4,5,6]", "checkpoint.every=2")
    train_session(tmp_path / "out", *words, "run.steps=4", "callback.profile.steps=[3,4]")
    train_session(tmp_path / "out", *words, "run.steps=6")
    found = {path.name[:23]: ranges(path) for path in (tmp_path / "out" / "profile").iterdir()}
    assert sorted(found) == ["steps-00000003-00000004", "steps-00000005-00000006"]
    steps = {key for key in found["steps-00000005-00000006"] if key.startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#5", "ProfilerStep#6"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps=[21]", "callback.profile.steps contains 21, but"),
        ("steps=[0]", "must each be at least 1"),
        ("ranks=[1]", "callback.profile.ranks contains 1, but"),
        ("steps=[]", "would write no trace"),
    ],
)
def test_invalid_steps_and_ranks_are_refused(setting, message):
    with pytest.raises(UserError, match=message):
        check(build_small_run("callback=profile", f"callback.profile.{setting}"))
