"""Explanation computed once per kind of block, equal to the sum over all blocks."""

from __future__ import annotations

import pytest

from gangline.config.compose import compose_one
from gangline.mesh import AXES, Mesh
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.links import count_together
from gangline_parallel_megatron_style.explain.explained import explain_case
from gangline_parallel_megatron_style.layout import alike
from gangline_parallel_megatron_style.layout.alike import names_single_blocks

SMALL = "batch.micro_size=1 model.layers=9 model.heads=8 model.kv_heads=8 model.vocab_size=264"


def explained(words: str, world: int):
    run = compose_one(f"{words} {SMALL} launch.processes={world} batch.global_size={2 * world}".split())
    return explain_case(Case.of(run, Mesh.of(run.parallel.size_axes(world))))


@pytest.mark.parametrize(
    ("words", "world"),
    [
        ("parallel=3d", 8),
        ("parallel=3d parallel.zero=3 parallel.cp=2 precision=bf16 run.recompute=full run.recompute_every=2", 16),
        ("parallel=3d parallel.zero=2 parallel.dp_replicate=2 run.recompute=selective", 16),
        ("parallel=3d parallel.schedule=interleaved_1f1b parallel.chunks=2 model.tied=true parallel.pp=4", 8),
        ("parallel=3d parallel.schedule=zb_v optimizer=muon", 8),
        ("parallel=3d parallel.context=ulysses parallel.cp=4 gradients=onebit parallel.pp=1", 8),
        ("parallel=fsdp model.tied=true", 4),
    ],
)
def test_grouping_equal_blocks_keeps_the_explanation(words, world, monkeypatch):
    found = explained(words, world)
    monkeypatch.setattr(alike, "names_single_blocks", lambda plan: True)
    assert explained(words, world) == found


def test_rule_about_one_block_disables_grouping():
    from gangline.model.compose import compose_model

    run = compose_one(["parallel=3d", "launch.processes=8", *SMALL.split()])
    tree, plan = compose_model(run)
    assert not names_single_blocks(plan)
    assert set(alike.group_blocks(tree, plan).kinds) == {0}
    single = plan.extend(frozen=(f"{plan.blocks}.3.attention",))
    assert names_single_blocks(single)
    assert alike.group_blocks(tree, single).kinds == list(range(9))


@pytest.mark.parametrize("node", [1, 4, 6, 8, 64])
def test_ranks_per_node_match_the_mesh_groups(node):
    for sizes in ((2, 1, 4, 1, 2), (1, 3, 2, 2, 4), (4, 2, 1, 3, 1), (2, 2, 2, 2, 3)):
        mesh = Mesh.of(dict(zip(AXES, sizes, strict=True)))
        for axes in (("tp",), ("cp",), ("dp_shard", "cp"), ("pp",), ("dp_replicate", "tp"), AXES):
            group = mesh.group(0, axes)
            assert count_together(mesh, axes, node) == (len(group), sum(rank < node for rank in group))
