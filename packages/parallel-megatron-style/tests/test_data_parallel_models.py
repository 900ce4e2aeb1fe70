"""Models with given weights, shared buffers or frozen parameters under data parallelism."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from runtimes import runtime_of

from gangline.model.build import construct
from gangline.model.compose import compose_model
from gangline.model.init import make_whole_model
from gangline_basics.precision.plain import Plain
from gangline_testkit.compare import assemble, compare_all
from gangline_testkit.inputs import share
from gangline_testkit.pool import get_pool
from gangline_testkit.runs import build_small_run

LAYOUTS = ["parallel=fsdp", "parallel=tp", "parallel=pp"]
FLOAT64 = Plain(torch.float64, torch.float64)


def given(settings, frozen=()):
    """Return the run, and its strategy built from a model that already has weights."""
    run = build_small_run(*settings)
    tree, plan = compose_model(run)
    model = make_whole_model(tree, replace(plan, frozen=tuple(frozen)), seed=3, dtype=torch.float64)
    return run, runtime_of(run, model=model, precision=FLOAT64)


def held(settings):
    _, runtime = given(settings)
    return [(shard.name, shard.offset, shard.local.clone()) for shard in runtime.shards()]


def stepped(settings, frozen):
    run, runtime = given(settings, frozen)
    index, width = runtime.data_coordinate
    size, length = run.batch.global_size, run.batch.sequence_length
    microbatches = share(0, index, width, size=size, micro_size=1, length=length, vocab_size=61, kind="ragged")
    result = runtime.step(microbatches)
    found = [
        (named.name, piece.shard.offset, piece.tensor.grad.clone())
        for named in runtime.parameters()
        for piece in named.pieces
    ]
    return result.loss_sum, result.tokens, runtime.clip(None), found, {n.name: n.shape for n in runtime.parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runtime_keeps_given_model_weights(layout):
    run = build_small_run(layout)
    tree, plan = compose_model(run)
    model = make_whole_model(tree, plan, seed=3, dtype=torch.float64)
    want = {f"model/{name}": weight.detach() for name, weight in model.named_parameters()}
    got = assemble(get_pool(2).run(held, (layout,)), {name: tuple(x.shape) for name, x in want.items()})
    compare_all("given", got, want, 0)


def shared_buffer(settings):
    """Return (values in each block of a buffer that both blocks registered on the meta device, names of its shards)."""
    run = build_small_run(*settings)
    model = construct(compose_model(run)[0])
    table = torch.empty(3, device="meta")
    for block in model.blocks:
        block.register_buffer("table", table)
    runtime = runtime_of(run, model=model, precision=FLOAT64)
    kept = [shard for shard in runtime.shards() if "table" in shard.name]
    for shard in kept:
        shard.local.copy_(torch.arange(3))
    return [block.table.tolist() for block in model.blocks], [shard.name for shard in kept]


@pytest.mark.parametrize("layout", ["parallel=fsdp", "parallel=tp"])
def test_buffer_shared_by_two_blocks_stays_shared(layout):
    for tables, names in get_pool(2).run(shared_buffer, (layout,)):
        assert tables == [[0.0, 1.0, 2.0]] * 2
        assert names == ["model/blocks.0.table"]


FROZEN = [("embed.weight",), ("embed", "blocks.0")]  # with the second, a first stage has no trainable parameters


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("frozen", FROZEN, ids=["embedding", "stage"])
def test_gradients_with_frozen_parameters_match_one_process(layout, tied, frozen):
    tie = f"model.tied={str(tied).lower()}"
    (want,) = get_pool(1).run(
        stepped, ("parallel=single", "parallel.groups=2" if layout == LAYOUTS[0] else tie, tie), frozen
    )
    ranks = get_pool(2).run(stepped, (layout, tie), frozen)
    shapes = {name: shape for rank_ in ranks for name, shape in rank_[4].items()}
    assert "embed.weight" not in shapes
    for loss, tokens, norm, _, _ in ranks:
        assert (loss, tokens) == (pytest.approx(want[0], rel=1e-12), want[1])
        assert norm == pytest.approx(want[2], rel=1e-12)
    got = assemble([found for _, _, _, found, _ in ranks], shapes)
    compare_all("gradient", got, assemble([want[3]], shapes), 1e-12)
