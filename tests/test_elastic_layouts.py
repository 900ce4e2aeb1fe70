"""Usable ranks of an elastic job: the layouts of every strategy, and the batch, decide."""

from __future__ import annotations

import pytest

from gangline.config.check import check
from gangline.config.defaults import build_default_run
from gangline.errors import UserError
from gangline_basics.launch import usable as usable_module
from gangline_basics.launch.several import UsableRanks
from gangline_basics.launch.usable import find_usable


def run_of(strategy: str = "3d", launch: dict | None = None, batch: dict | None = None, **axes):
    run = build_default_run(
        run={"dir": "somewhere"}, parallel=strategy, launch="elastic", batch={"global_size": 8} | (batch or {})
    )
    for name, value in ({"processes": 8, "nodes": "2:3"} | (launch or {})).items():
        setattr(run.launch, name, value)
    for name, value in axes.items():
        setattr(run.parallel, name, value)
    return run


@pytest.mark.parametrize(
    ("strategy", "batch", "there", "used"),
    [
        ("3d", {}, 8, 8),
        ("ddp", {}, 6, 4),  # 8 samples are not divisible by 6 or 5 ranks
        ("ddp", {"micro_size": 4}, 4, 2),
        ("ddp", {"global_size": 6}, 6, 6),
    ],
)
def test_usable_ranks_fit_layout_and_batch(strategy, batch, there, used):
    found, reasons = find_usable(run_of(strategy, batch=batch), there)
    assert found == used
    assert bool(reasons) == (used < there), "who waits is told why"


def test_usable_ranks_need_few_full_checks(monkeypatch):
    """Check that axes and batch exclude most numbers of ranks first. A full check takes a fraction of a second."""
    checked = []
    whole = usable_module.find_problems
    monkeypatch.setattr(usable_module, "find_problems", lambda run: checked.append(run.launch.processes) or whole(run))
    found = UsableRanks(run_of(launch={"processes": 992, "nodes": "124"}, batch={"global_size": 7}), 992)
    assert found(992)[0] == found(1000)[0] == 28
    assert len(checked) < 5


def test_only_unset_axes_follow_world_size():
    open_axes, said = run_of(tp=2, pp=2), run_of(dp_shard=2, tp=2, pp=2)
    assert find_usable(open_axes, 6)[0] == 4
    assert find_usable(said, 8)[0] == 8
    assert find_usable(said, 6)[0] == 0


def test_unusable_node_count_is_refused_before_start():
    check(run_of(tp=2, pp=2))
    with pytest.raises(UserError, match="the minimum of 2 nodes has 6 processes, and no layout fits"):
        check(run_of(dp_shard=2, tp=2, pp=2))
