"""Quantized frozen weights under data parallelism: storage bytes against the closed form, codes per rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gangline.config.defaults import build_default_run
from gangline.mesh import Mesh
from gangline.model.compose import Composed, compose_model
from gangline.model.init import initialise
from gangline.plugin import registry
from gangline.runtime import Job
from gangline.shard import Shard, name_model_array
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.low_bit import decode
from gangline_basics.model.low_bit_node import keep_in_8_bits
from gangline_parallel_megatron_style.config import ThreeD
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.memory import count_state_bytes
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

MODEL = DecoderConfig(vocab_size=64, dim=64, layers=3, heads=4, ffn_dim=256)


def made(world: int, tp: int, zero: int, precision: str):
    """Return (run, tree, plan) of a model whose blocks are frozen and stored in 8 bits."""
    parallel = ThreeD(tp=tp, pp=1, zero=zero, dp_replicate=1, dp_shard=world // tp)
    batch = {"global_size": world, "micro_size": 1, "sequence_length": 8}
    run = build_default_run(model=MODEL, parallel=parallel, precision=precision, batch=batch)
    tree, plan = compose_model(run)
    tree, plan, paths = keep_in_8_bits(tree, plan.extend(frozen=("blocks",)))
    assert len(paths) == 7 * MODEL.layers
    return run, tree, plan


def distinct(tensors: list[Tensor]) -> int:
    """Return the bytes of the storages behind these tensors; each storage counts once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    storages.pop(0, None)  # freed storages
    return sum(storages.values())


def body(tp: int, zero: int, precision: str):
    """Return (bytes of weights, bytes of separate master weights, this rank's codes and scales of one linear layer)."""
    run, tree, plan = made(rank.world, tp, zero, precision)
    mesh = Mesh.of(run.parallel.size_axes(rank.world))
    finish = make_finish(run.job.recompute, run.job.compile, run.job.recompute_every, plan.seams)
    precision = registry.build(run.precision, run)
    runtime = registry.build(
        run.parallel, Job(Composed(run, tree, plan), mesh, rank.make_comms(mesh), precision, finish)
    )
    initialise(runtime.shards(), plan, run.seed)
    buffers = runtime.storage.param_buffers
    weights = distinct([buffer.full for buffer in buffers])
    both = distinct([x for buffer in buffers for x in (buffer.full, buffer.shard)])
    place = "model/blocks.1.feed_forward.w_down."
    parts = [
        (s.name.removeprefix(place), s.offset, s.local.clone()) for s in runtime.shards() if s.name.startswith(place)
    ]
    return weights, both - weights, parts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("tp", "zero"), [(1, 0), (1, 1), (1, 3), (2, 1)])
def test_8bit_weights_match_closed_form_and_unsharded_codes(tp, zero, precision):
    run, tree, plan = made(2, tp, zero, precision)
    case = Case.of(run, Mesh.of(run.parallel.size_axes(2)), (tree, plan))
    found = get_pool(2).run(body, tp, zero, precision)
    told = count_state_bytes(case, 0)
    for weights, masters, _ in found:
        assert weights == pytest.approx(told["weights"], rel=0.03)  # ranges are padded to the grain of the packing
        assert masters == pytest.approx(told["master weights"], rel=0.03)
    shape = (64, 256)
    whole = torch.empty(shape)
    name = "blocks.1.feed_forward.w_down.weight"
    initialise([Shard(name_model_array(name), shape, whole.dtype, (0, 0), whole)], plan, run.seed)
    codes, scales = torch.zeros(shape, dtype=torch.int8), torch.zeros(64, 256 // 64)
    for _, _, parts in found:
        for which, (row, column), local in parts:
            into = codes if which == "weight" else scales
            into[row : row + len(local), column : column + local.shape[1]] = local
    assert torch.equal(decode(codes, scales), whole)
