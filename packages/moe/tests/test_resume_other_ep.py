"""Resume with another `moe.ep`: accepted, because the number of ranks that share experts may change."""

from __future__ import annotations

import pytest

from gangline.config.resume import continue_run
from gangline.config.serial import to_dict
from gangline.errors import UserError
from gangline_testkit import RealRuns
from gangline_testkit.runs import build_small_run


def test_resume_may_change_ep_but_not_experts():
    content = to_dict(build_small_run("moe=on", "moe.ep=2"))
    run, changed = continue_run("runs/x", content, ["moe.ep=4", "moe.ep_axes=[dp_shard,tp]", "moe.ranks_per_node=2"])
    assert run.edits["moe"].ep == 4
    assert sorted(changed) == ["moe.ep", "moe.ep_axes", "moe.ranks_per_node"]
    with pytest.raises(UserError, match=r"cannot change moe.experts \(8 -> 16\).*\n.*\n.*moe.ep, moe.ep_axes"):
        continue_run("runs/x", content, ["moe.experts=16"])


@pytest.mark.nightly
def test_compiled_moe_run_matches_uncompiled_run(tmp_path):
    with RealRuns(tmp_path) as runs:
        runs.train("moe=on", "run.steps=4", "run.dir=plain")
        runs.train("moe=on", "run.steps=4", "run.compile=true", "run.dir=compiled")
    for one, other in zip(runs.read_records("compiled"), runs.read_records("plain"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
