"""Shard registry of a composed layout: arrays tiled once, identical on every rank, for any mesh and fold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gangline.mesh import Mesh
from gangline.plan import Fold, Plan, ShardRule
from gangline_parallel_megatron_style.sharding.arrays import TIED, ModelShapes, lay_out

D, V, F, HEADS, KEYS, E = 8, 11, 12, 4, 2, 4
LAYERS = 3
PLAN = Plan(
    embed="embed",
    blocks="blocks",
    head="head",
    layers=LAYERS,
    sharding=(
        ShardRule("embed.weight", 0),
        ShardRule.colwise("blocks.*.q", 2),
        ShardRule.colwise("blocks.*.k", 2),
        ShardRule.rowwise("blocks.*.o", 2),
        ShardRule("blocks.*.lanes", 0, "lane"),
        ShardRule("head.weight", 0),
    ),
    partial_grad=("blocks.*.q_norm",),
)
BLOCK = {
    "norm": (D,),
    "q": (HEADS * 2, D),
    "k": (KEYS * 2, D),
    "o": (D, HEADS * 2),
    "q_norm": (2,),
    "lanes": (E, F, D),
}
SHAPES = {
    "embed.weight": (V, D),
    **{f"blocks.{i}.{name}": shape for i in range(LAYERS) for name, shape in BLOCK.items()},
    "head.norm": (D,),
    "head.weight": (V, D),
}
BUFFERS = {"blocks.1.balance": ((E,), "float64")}


def of(tied: bool) -> ModelShapes:
    shapes = {name: shape for name, shape in SHAPES.items() if not (tied and name == "head.weight")}
    aliases = {name: (name,) for name in (*shapes, *BUFFERS)}
    if tied:
        aliases["embed.weight"] = ("embed.weight", "head.weight")
    return ModelShapes(shapes, BUFFERS, aliases)


meshes = st.fixed_dictionaries(
    {
        "pp": st.sampled_from([1, 2]),
        "dp_replicate": st.sampled_from([1, 2]),
        "dp_shard": st.sampled_from([1, 2, 3, 4]),
        "cp": st.sampled_from([1, 2]),
        "tp": st.sampled_from([1, 2, 4]),
    }
).map(Mesh.of)
folds = st.sampled_from([(1, ("dp_shard",)), (2, ("dp_shard",)), (2, ("dp_shard", "tp")), (4, ("cp", "dp_shard"))])


@settings(deadline=None, max_examples=60)
@given(meshes, folds, st.booleans(), st.booleans(), st.integers(0, 3))
def test_primary_boxes_tile_every_array_once(mesh, fold, tied, sequence_parallel, zero):
    size, out_of = fold
    joint = mesh.size(*out_of)
    plan = replace(PLAN, folds=(Fold("lane", size if joint % size == 0 else 1, out_of),))
    ranks = [0] * 3 + [mesh.size("pp") - 1] * 2
    given_ = of(tied)
    arrays = lay_out(plan, mesh, given_, ranks, zero=zero, sequence_parallel=sequence_parallel, dtype="float32")
    assert set(arrays.registry) == {f"model/{name}" for name in (*given_.shapes, *BUFFERS)}
    for name in arrays.registry:
        written = np.zeros(arrays.registry[name].shape, dtype=int)
        for rank in range(mesh.world):
            for box, primary in arrays.registry.list_rank_boxes(name, rank):
                written[box.slices] += primary
        assert (written == 1).all(), name


def test_array_divisions_follow_plan_shard_rules():
    """Check an edit's rules, which come first: no later rule shards a dim that an earlier rule leaves whole."""
    mine = (
        ShardRule.replicated("blocks.0.q"),
        ShardRule.rowwise("blocks.*.q_norm"),
        ShardRule("blocks.*.q_norm", 0),
        ShardRule("blocks.1.q", 1),
    )
    plan = replace(PLAN, sharding=(*mine, *PLAN.sharding), folds=(Fold("lane", 2, ("dp_shard",)),))
    mesh = Mesh.of({"dp_shard": 2, "tp": 2})
    arrays = lay_out(plan, mesh, of(False), [0] * 5, zero=0, sequence_parallel=True, dtype="float32")
    for name, shape in SHAPES.items():
        dims = {division.dim for division in arrays.registry[f"model/{name}"].divisions}
        assert dims == {rule.dim for rule in plan.get_shard_rules(name, len(shape)).values()}, name
    parts = [arrays.registry.list_rank_boxes(f"model/blocks.{i}.q", 0)[0][0].shape for i in range(3)]
    assert parts == [(8, 8), (8, 4), (4, 8)]
    assert arrays.registry.list_rank_boxes("model/blocks.0.q_norm", 0)[0][0].shape == (2,)


def test_shared_key_heads_reduce_over_neighbour_ranks():
    mesh = Mesh.of({"tp": 4})
    arrays = lay_out(PLAN, mesh, of(False), [0] * 5, zero=1, sequence_parallel=False, dtype="float32")
    (buffer,) = [b for b in arrays.groups["blocks.0"] if b.kind.fold is None]
    assert {name.split(".")[-1]: count for name, count in buffer.sums.items()} == {
        "norm": 0, "q": 0, "k": 2, "o": 0, "q_norm": 4, "lanes": 0,
    }  # fmt: skip
    assert [arrays.registry.list_rank_boxes("model/blocks.0.k", rank)[0][0].offset[0] for rank in range(4)] == [
        0,
        0,
        2,
        2,
    ]


def test_sequence_parallelism_reduces_replicated_arrays_over_tp():
    arrays = lay_out(PLAN, Mesh.of({"tp": 2}), of(False), [0] * 5, zero=1, sequence_parallel=True, dtype="float32")
    (buffer,) = arrays.groups["blocks.0"]
    assert buffer.sums["blocks.0.norm"] == buffer.sums["blocks.0.q_norm"] == buffer.sums["blocks.0.lanes"] == 2
    assert buffer.sums["blocks.0.q"] == 0


def test_vocabulary_may_be_sharded_unevenly():
    registry = lay_out(PLAN, Mesh.of({"tp": 4}), of(False), [0] * 5, zero=1, sequence_parallel=True, dtype="f").registry
    assert [registry.list_rank_boxes("model/head.weight", rank)[0][0].shape[0] for rank in range(4)] == [3, 3, 3, 2]


def test_tied_embedding_belongs_to_first_and_last_stage():
    mesh = Mesh.of({"pp": 2})
    arrays = lay_out(PLAN, mesh, of(True), [0, 0, 0, 1, 1], zero=1, sequence_parallel=False, dtype="float32")
    assert arrays.stage[TIED] == (0, 1)
    assert arrays.registry.list_rank_boxes("model/embed.weight", 1) == []


def test_buffer_shared_across_stages_is_refused():
    given_ = of(False)
    given_.aliases["blocks.1.balance"] = ("blocks.1.balance", "blocks.2.balance")
    options = {"zero": 1, "sequence_parallel": False, "dtype": "float32"}
    registry = lay_out(PLAN, Mesh.of({"pp": 2}), given_, [0, 0, 1, 1, 1], **options).registry
    assert registry["model/blocks.1.balance"].at == (("pp", 1),)
    with pytest.raises(ValueError, match=r"shared by modules on the pipeline ranks \[0, 1\]"):
        lay_out(PLAN, Mesh.of({"pp": 2}), given_, [0, 0, 0, 1, 1], **options)


@pytest.mark.parametrize(
    ("plan", "aliases", "message"),
    [
        (PLAN, ("blocks.0.q", "blocks.1.q"), "only the embedding and the head"),
        (replace(PLAN, head="top"), None, "outside the modules of the plan"),
        (replace(PLAN, sharding=(ShardRule.colwise("blocks.*.q", 3),)), None, "not a multiple of its granularity 3"),
    ],
)
def test_plan_inconsistent_with_model_is_refused(plan, aliases, message):
    given_ = of(False)
    if aliases:
        given_.aliases["blocks.0.q"] = aliases
    with pytest.raises(ValueError, match=message):
        lay_out(plan, Mesh.of({"tp": 2}), given_, [0] * 5, zero=1, sequence_parallel=False, dtype="float32")
