"""Data of a layout explanation, compared with the closed forms, the schedules and the model."""

from __future__ import annotations

from collections import Counter

import pytest

from gangline.config.compose import compose_one
from gangline.mesh import Mesh
from gangline_basics.explain.timeline import ActionTimes, step_timeline
from gangline_parallel_megatron_style.cost import timing, traffic
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.pipeline.simulate import simulate

LAYOUTS = [
    "parallel=3d",
    "parallel=3d parallel.sequence_parallel=false run.recompute=full",
    "parallel=3d run.recompute=full run.recompute_every=2 model.tied=false",
    "parallel=3d parallel.schedule=interleaved_1f1b model.qk_norm=true model.layers=4",
    "parallel=3d parallel.schedule=zb_v model.layers=4",
    "parallel=3d parallel.schedule=dualpipe_v parallel.overlap=true model.layers=4",
    "parallel=3d parallel.zero=3 precision=bf16",
    "parallel=fsdp launch.processes=4 precision=bf16",
    "parallel=hsdp launch.processes=8 parallel.zero=2",
    "parallel=3d parallel.pp=1 parallel.cp=2 model.window=9 model.full_every=2",
    "parallel=3d parallel.pp=1 parallel.cp=2 parallel.context=ulysses precision=bf16",
    "parallel=fsdp launch.processes=8 parallel.cp=4 parallel.context=ulysses run.recompute=selective model.ffn_dim=96",
    "parallel=3d optimizer=muon",
]


@pytest.fixture(scope="module", params=LAYOUTS)
def both(request):
    run = compose_one(request.param.split())
    mesh = Mesh.of(run.parallel.size_axes(run.launch.processes or 8))
    found = run.parallel.explain(run, mesh)
    return Case.of(run, mesh), found


def test_transfers_match_closed_forms(both):
    case, found = both
    for rank, explained in enumerate(found.ranks):
        sums = Counter[tuple]()
        for sent in explained.transfers:
            sums[sent.axes, sent.purpose, "calls"] += sent.calls
            sums[sent.axes, sent.purpose, "bytes"] += sent.bytes
            assert sent.ranks > 1
            assert 1 <= sent.each_node <= sent.ranks
            assert (sent.tier == "node") == (sent.each_node == sent.ranks)
        whole = Counter[tuple]()
        for sent in traffic.list_sent(case, rank):
            whole[sent.axes, sent.purpose, "calls"] += sent.calls
            whole[sent.axes, sent.purpose, "bytes"] += sent.bytes
        assert sums == whole


def test_matmul_flops_match_closed_form(both):
    """Compare the FLOPs that `timing.count_rank_flops` counts from the plan with the matmuls that nodes declare."""
    case, found = both
    assert found.unknown == ()
    for rank, explained in enumerate(found.ranks):
        again = case.recompute.value == "full"  # the closed form leaves out selective recomputation
        total = 0
        for stage in explained.stages:
            work = found.work[stage]
            frozen = sum(p.flops * n for p, n in work.forward.items() if not hasattr(p, "weight") or p in work.weights)
            total += 2 * work.flops + frozen + again * sum(p.flops * n for p, n in work.recompute.items())
        assert total * found.microbatches == pytest.approx(timing.count_rank_flops(case, rank), rel=0.02)
        assert explained.flops == timing.count_rank_flops(case, rank)


def test_timeline_matches_the_schedule(both):
    case, found = both
    schedule = timing.find_schedule(case)
    if schedule is None:
        assert [a.kind for turn in found.ranks[0].turns for a in turn] == ["F", "B"] * case.microbatches
        return
    times = [ActionTimes(1.0 + stage, 2.0, 1.5 + stage) for stage in range(schedule.stages)]
    ours = step_timeline(found, [ActionTimes(time.F, time.I, time.W) for time in times], latency=0.25)
    theirs = simulate(schedule, times, latency=0.25)
    assert [[(start, end) for _, start, end in spans] for spans in ours.spans] == [list(s) for s in theirs.spans]
    assert ours.bubble == pytest.approx(theirs.bubble)


def test_topology_changes_transfer_tiers():
    from gangline.explain.topology import Topology

    run = compose_one(["parallel=3d"])
    found = run.parallel.explain(run, Mesh.of(run.parallel.size_axes(8)), topology=Topology(gpus_per_node=2))
    assert {sent.tier for sent in found.ranks[0].transfers if sent.axes == ("tp",)} == {"node"}
    assert {sent.each_node for sent in found.ranks[0].transfers if sent.axes == ("pp",)} == {1}
