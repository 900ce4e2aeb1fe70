"""Every layout runs on the fake device as on the CPU: equal losses, no wrong tensors for NCCL, known host waits."""

from __future__ import annotations

import pytest
from layouts import CPU, Layout, measure, run_layout
from page import UPDATES, describe_waits, read_waits

MOE = ("moe=on", "moe.experts=4", "moe.top_k=2")
GRID = "parallel=3d"
LAYOUTS = [
    Layout("one rank"),
    Layout("fp16", ("precision=fp16",)),
    Layout("documents", kind="documents"),
    Layout("window", ("model.window=8",)),
    Layout("recompute", ("run.recompute=full",)),
    Layout("deterministic", ("run.deterministic=true",)),
    Layout("muon", ("optimizer=muon",)),
    Layout("lion", ("optimizer=lion",)),
    Layout("adamw8bit", ("optimizer=adamw8bit",)),
    Layout("fp8 per tensor", ("precision=fp8", "precision.scaling=tensor")),
    Layout("fp8 per row", ("precision=fp8", "precision.scaling=row")),
    Layout("experts", MOE),
    Layout("experts with capacity", (*MOE, "moe.capacity_factor=1.5")),
    Layout("ddp of 2", ("parallel=ddp",), 2),
    Layout("fsdp of 2", ("parallel=fsdp",), 2),
    Layout("fsdp of 2, offload", ("parallel=fsdp", "parallel.offload=true"), 2),
    Layout("tensor 2", (GRID, "parallel.tp=2", "parallel.pp=1"), 2),
    Layout("tensor 2, rank 1", (GRID, "parallel.tp=2", "parallel.pp=1"), 2, 1),
    Layout("pipeline 2, rank 0", (GRID, "parallel.tp=1", "parallel.pp=2"), 2),
    Layout("pipeline 2, rank 1", (GRID, "parallel.tp=1", "parallel.pp=2"), 2, 1),
    Layout("ring of 2", (GRID, "parallel.tp=1", "parallel.pp=1", "parallel.cp=2"), 2),
    Layout("ring of 2, documents", (GRID, "parallel.tp=1", "parallel.pp=1", "parallel.cp=2"), 2, kind="documents"),
    Layout("3d of 8, last rank", (GRID,), 8, 7),
    Layout("experts on 2 ranks", (*MOE, "parallel=fsdp", "moe.ep=2"), 2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_are_those_of_the_cpu_and_waits_those_of_the_page(layout: Layout) -> None:
    ours = measure(layout)
    assert not ours.problems
    assert UPDATES or read_waits().get(layout.name) == describe_waits(ours.waits)
    theirs = run_layout(layout, CPU, *([] if layout.states_precision else ["precision=fp32"]))
    assert ours.losses == pytest.approx(theirs.losses, rel=0.02)
    assert ours.norms == pytest.approx(theirs.norms, rel=0.1)
