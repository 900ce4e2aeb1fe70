"""Runs of `moe=on` by the real command, resumed on other layouts and other sizes of `moe.ep`."""

from __future__ import annotations

from curves import same

EXPERTS = ("moe=on", "moe.router.bias_rate=0.01", "moe.shared=1")


def test_expert_checkpoint_resumes_on_other_rank_counts(curves):
    """Train on `parallel=3d`, on four processes and on one in turn, and compare with a run on one process."""
    curves.train("run.dir=experts-alone", *EXPERTS, "launch.processes=1", "run.steps=6")
    curves.train("run.dir=experts", *EXPERTS, "parallel=3d", "run.steps=2")
    curves.train("resume=experts", "parallel=fsdp", "launch.processes=4", "run.steps=4")
    curves.train("resume=experts", "parallel=single", "launch.processes=1", "run.steps=6")
    same(curves.read_records("experts"), curves.read_records("experts-alone"))
