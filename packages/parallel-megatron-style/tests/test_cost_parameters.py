"""Closed forms of parameter counts, compared with models on the meta device and with the shard registry."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings, strategies as st

from gangline.config.defaults import build_default_run
from gangline.mesh import Mesh
from gangline.model.build import construct
from gangline.model.compose import compose_model
from gangline.plan import Fold, ShardRule
from gangline_basics.model.config import DecoderConfig
from gangline_parallel_megatron_style.config import ThreeD
from gangline_parallel_megatron_style.cost import activations
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.memory import count_state_bytes
from gangline_parallel_megatron_style.cost.parameters import ModelArrays
from gangline_parallel_megatron_style.cost.peak_memory import iterate_rank_moments
from gangline_parallel_megatron_style.layout.alike import AlikeBlocks
from gangline_parallel_megatron_style.pipeline.actions import compute_place
from gangline_parallel_megatron_style.sharding.arrays import ModelShapes, lay_out

MODEL = DecoderConfig(vocab_size=37, dim=32, layers=5, heads=4, kv_heads=2, ffn_dim=48)


def case_of(config: ThreeD | None = None, model: DecoderConfig = MODEL, **axes) -> Case:
    config = config or ThreeD()
    return Case.of(build_default_run(parallel=config, model=model, batch={"global_size": 8}), Mesh.of(axes))


def numels(model: DecoderConfig) -> Counter[str]:
    """Count the parameters of each kind in the modules."""
    tree, plan = compose_model(build_default_run(model=model))
    found: Counter[str] = Counter()
    for name, parameter in construct(tree).named_parameters():
        inside = name.startswith(f"{plan.blocks}.")
        found[name.split(".")[2 if inside else 0]] += parameter.numel()
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_one_rank_counts_all_model_parameters(tied, qk_norm):
    model = replace(MODEL, tied=tied, qk_norm=qk_norm)
    held: Counter[str] = Counter()
    for array in case_of(model=model).list_held(0):
        held[array.name.split(".")[0 if array.block is None else 2]] += array.size
    assert held == numels(model)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_v"])
def test_stages_count_tied_embedding_twice(schedule):
    case = case_of(ThreeD(schedule=schedule), replace(MODEL, tied=True), pp=2)
    names = [array.name for rank in range(2) for array in case.list_held(rank)]
    twice = [name for name, count in Counter(names).items() if count > 1]
    assert twice == ([] if schedule == "zb_v" else ["embed.weight"])  # zb_v: first and last stage on rank 0
    assert set(names) == {array.name for array in case.arrays}


meshes = st.fixed_dictionaries(
    {"pp": st.sampled_from([1, 2]), "dp_shard": st.sampled_from([1, 2, 4]), "tp": st.sampled_from([1, 2, 4])}
)


@settings(max_examples=30)
@given(meshes, st.booleans(), st.sampled_from([None, ("dp_shard",), ("dp_shard", "tp")]))
def test_array_sizes_match_the_registry(axes, sequence_parallel, fold):
    mesh, run = Mesh.of(axes), build_default_run(parallel=ThreeD(), model=MODEL)
    tree, plan = compose_model(run)
    if fold:
        rule = ShardRule("blocks.*.feed_forward.w_up", 1, "lane")
        others = tuple(other for other in plan.sharding if "w_up" not in other.pattern)
        plan = replace(plan, sharding=(rule, *others), folds=(Fold("lane", 2, fold),))
    shapes = {name: tuple(parameter.shape) for name, parameter in construct(tree).named_parameters()}
    pp = mesh.size("pp")
    stages = [range(0, 5)] if pp == 1 else [range(0, 3), range(3, 5)]
    homes = [compute_place(pp, "loop", stage)[0] for stage, blocks in enumerate(stages) for _ in blocks]
    given_ = ModelShapes(shapes, {}, {name: (name,) for name in shapes})
    arrays = lay_out(
        plan, mesh, given_, (0, *homes, pp - 1), zero=0, sequence_parallel=sequence_parallel, dtype="float32"
    )
    sums = {
        name: count for buffers in arrays.groups.values() for buffer in buffers for name, count in buffer.sums.items()
    }
    made, last = ModelArrays(AlikeBlocks(tree, plan), mesh, sequence_parallel and mesh.size("tp") > 1), pp - 1
    found = [*made.list_arrays("embed", (0,), last), *made.list_arrays("head", (last,), last)]
    found += [
        array
        for stage, blocks in enumerate(stages)
        for block in blocks
        for array in made.list_arrays(block, (stage,), last)
    ]
    assert {array.name: array.shape for array in found} == shapes
    for array in found:
        boxes = [arrays.registry.list_rank_boxes(f"model/{array.name}", rank) for rank in range(mesh.world)]
        sizes = [sum(box.size for box, _ in held) for held in boxes]
        assert max(sizes) == array.size, array.name
        on = {mesh.coordinate(rank)["pp"] for rank, size in enumerate(sizes) if size}
        assert on == {stage % pp for stage in array.stages}, array.name
        assert max(sums[array.name], 1) == array.sums, array.name


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_state_bytes_follow_zero_stage(zero):
    """Compare with figure 1 of Rajbhandari et al., arXiv 1910.02054, for float32.

    A parameter takes 4 + 4 + 8 bytes, and a rank holds all or a fourth of the bytes.
    """
    case = replace(case_of(ThreeD(zero=zero, prefetch=0), dp_shard=4), microbatches=2)
    numbers = sum(prod(array.shape) for array in case.arrays)
    parts = sum(array.part for array in case.arrays)
    block = sum(array.size for array in case.arrays if array.block == 0)
    found, more = (
        count_state_bytes(case, 0),
        list(iterate_rank_moments(case, 0, activations.make_activation_sizes(case))),
    )
    found["gradients"] += max(moment["gradients"] for moment in more)
    found["weights"] += max(moment["weights"] for moment in more)
    assert found["optimizer state"] == 8 * (parts if zero else numbers)
    assert found["gradients"] == 4 * (numbers if zero < 2 else parts + 2 * block)
    assert found["weights"] == 4 * (numbers if zero < 3 else block)
    assert found["master weights"] == (4 * parts if zero == 3 else 0)
