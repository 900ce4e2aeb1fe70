"""`precision=fp32`, `fp64`, `bf16`, `fp16`: dtypes of each computation, loss scale, master weights.

Checkpoints hold the master weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gangline.batch import Batch
from gangline.config.sections import Recompute
from gangline.mesh import Mesh
from gangline.model.build import construct
from gangline.model.compose import Composed
from gangline.model.init import initialise
from gangline.precision import Precision
from gangline.runtime import Job
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.gradients.config import SumGradients
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.plan import plan_decoder
from gangline_basics.optimizer.adamw import build as build_adamw
from gangline_basics.optimizer.config import Adamw
from gangline_basics.parallel.config import Ddp, Single
from gangline_basics.parallel.ddp import build as build_ddp
from gangline_basics.parallel.single import build as build_single
from gangline_basics.parallel.storage import WholeStorage
from gangline_basics.precision.config import PARTS, Fp16
from gangline_basics.precision.fp16 import ScaledFp16
from gangline_basics.precision.plain import Plain
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

RUN = SimpleNamespace(seed=1, deterministic=False, gradients=SumGradients())
T = 6


def tiny_batch(rows=2, step=0):
    tokens = torch.randint(0, 16, (rows, T + 1), generator=torch.Generator().manual_seed(step))
    position = torch.arange(T).expand(rows, T)
    return Batch(
        tokens[:, :-1], tokens[:, 1:], torch.ones(rows, T, dtype=torch.bool), position, torch.arange(rows), step=step
    )


def runtime_of(precision: Precision, parallel=None, frozen: Sequence[str] = ()):
    """Return a runtime with initialized weights. frozen: parameters that are not trained."""
    tree, plan = plan_decoder(DecoderConfig(vocab_size=16, dim=8, layers=1, heads=2, ffn_dim=8))
    plan = replace(plan, frozen=tuple(frozen))
    parallel = parallel or Single()
    mesh = Mesh.of(parallel.size_axes(rank.world))
    build = build_single if isinstance(parallel, Single) else build_ddp
    comms = rank.make_comms(mesh, False)
    finish = make_finish(Recompute.none, False)
    runtime = build(parallel, Job(Composed(RUN, tree, plan), mesh, comms, precision, finish))
    initialise(runtime.shards(), plan, 1)
    return runtime


class Dtypes(Plain):
    """Precision with any four dtypes."""

    def __init__(self, compute, kept, reduce, grad):
        super().__init__(compute, kept)
        self.reduce_dtype, self.grad_dtype = reduce, grad


def test_bf16_computes_in_bfloat16_with_float32_masters():
    runtime = runtime_of(Plain(torch.bfloat16, torch.float32))
    seen = []
    runtime.stages.blocks[0].register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    runtime.step([tiny_batch(), tiny_batch(step=1)])
    optimizer = build_adamw(Adamw(), RUN, runtime)
    assert seen == [torch.bfloat16] * 2
    assert {parameter.dtype for parameter in runtime.model.parameters()} == {torch.bfloat16}
    pieces = [piece.tensor for named in runtime.parameters() for piece in named.pieces]
    assert {piece.dtype for piece in pieces} == {piece.grad.dtype for piece in pieces} == {torch.float32}
    assert {shard.dtype for shard in (*runtime.shards(), *optimizer.shards())} == {torch.float32}


def test_gradients_of_microbatches_add_up_in_float32():
    """Check four equal microbatches, each with weight 1/4: bfloat16 could not represent the sum of the first three."""
    runtime = runtime_of(Plain(torch.bfloat16, torch.float32))

    def gradients(count):
        runtime.step([tiny_batch()] * count)
        return [piece.tensor.grad.clone() for named in runtime.parameters() for piece in named.pieces]

    one, four = gradients(1), gradients(4)
    assert all(a.equal(b) for a, b in zip(one, four, strict=True))
    assert not all((a + a + a).equal((a + a + a).bfloat16().float()) for a in one)


def changed_loss(write) -> bool:
    runtime = runtime_of(Plain(torch.bfloat16, torch.float32))
    before = runtime.evaluate([tiny_batch()])
    assert math.isfinite(before[0])
    write(runtime)
    return runtime.evaluate([tiny_batch()]) != before


def halve(runtime):
    for shard in runtime.shards():
        shard.local.mul_(0.5)


def through_numpy(runtime):
    """Write weights through NumPy, as a checkpointer may, so that torch does not notice the write."""
    for shard in runtime.shards():
        shard.local.numpy()[...] *= 0.5


def fused_step(runtime):
    """Update weights with the fused kernel, which does not increase the version of a tensor."""
    runtime.step([tiny_batch()])
    build_adamw(Adamw(), RUN, runtime).step(0.1)


@pytest.mark.parametrize("write", [halve, through_numpy, fused_step])
def test_writes_to_masters_change_next_forward(write):
    assert changed_loss(write)


def test_matmuls_have_compute_dtype():
    x, w, b = torch.randn(2, 3), torch.randn(4, 3), torch.randn(4)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        out = Plain(dtype, torch.float32).linear(x, w.to(dtype), b.to(dtype))
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), x @ w.T + b, rtol=3e-2, atol=3e-2)


def test_a_loss_scale_changes_no_gradient():
    """Compare bit for bit, because scaling by a power of two does not round."""

    class Scaled(Plain):
        scale = 1024.0

    plain, scaled = runtime_of(Plain(torch.float32, torch.float32)), runtime_of(Scaled(torch.float32, torch.float32))
    results = [runtime.step([tiny_batch(), tiny_batch(step=1)]) for runtime in (plain, scaled)]
    assert results[0] == results[1]
    assert plain.clip(None) == scaled.clip(None)
    for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert one.pieces[0].tensor.grad.equal(other.pieces[0].tensor.grad)


def test_fp16_lowers_scale_until_gradients_are_finite():
    precision = ScaledFp16(Fp16(initial_scale=2.0**40))
    runtime = runtime_of(precision)
    finite = []
    for step in range(40):
        result = runtime.step([tiny_batch(step=step)])
        finite.append(result.finite)
        precision.update(found_inf=not result.finite)
        if result.finite:
            break
    assert finite[0] is False
    assert finite[-1] is True
    assert precision.scale == 2.0 ** (40 - len(finite) + 1)
    reference = runtime_of(Plain(torch.float32, torch.float32))
    reference.step([tiny_batch(step=len(finite) - 1)])
    assert runtime.clip(None) == pytest.approx(reference.clip(None), rel=2e-2)


def test_loss_scale_grows_shrinks_and_resumes():
    precision = ScaledFp16(Fp16(initial_scale=8.0, growth_interval=2, min_scale=2.0))
    scales = []
    for found_inf in (False, False, False, True, False, False, True, True, True, True):
        precision.update(found_inf)
        scales.append(precision.scale)
    assert scales == [8, 16, 16, 8, 8, 16, 8, 4, 2, 2]
    precision.update(False)
    again = ScaledFp16(Fp16(growth_interval=2))
    again.load_state(precision.state())
    again.update(False)
    assert again.scale == 4


def test_initial_scale_below_minimum_is_refused():
    assert len(Fp16(initial_scale=0.5, min_scale=1.0).check(RUN)) == 1
    assert Fp16().check(RUN) == []


def reduced(dtypes):
    precision = Dtypes(*dtypes)
    runtime = runtime_of(precision, Ddp())
    runtime.step([tiny_batch(step=rank.index)])
    return [piece.tensor.grad.clone() for named in runtime.parameters() for piece in named.pieces]


def test_gradients_are_communicated_in_reduce_dtype():
    full = get_pool(2).run(reduced, (torch.float32,) * 4)[0]
    short = get_pool(2).run(reduced, (torch.float32, torch.float32, torch.bfloat16, torch.float32))[0]
    assert {gradient.dtype for gradient in short} == {torch.float32}
    for a, b in zip(full, short, strict=True):
        assert b.equal(b.bfloat16().float())
        assert (a - b).norm() < 1e-2 * a.norm()
    assert not all(a.equal(b) for a, b in zip(full, short, strict=True))


def test_existing_weights_are_not_reinitialized():
    """Check a model that is not on the meta device, and so already has values."""
    tree, plan = plan_decoder(DecoderConfig(vocab_size=16, dim=8, layers=1, heads=2, ffn_dim=8, tied=True))
    model = construct(tree).to_empty(device="cpu")
    model.head.weight = model.embed.weight
    torch.nn.init.normal_(model.embed.weight)
    values = model.embed.weight.detach().clone()
    storage = WholeStorage(model, plan, Plain(torch.bfloat16, torch.float64), torch.device("cpu"))
    storage.refresh()
    assert storage.masters["embed.weight"].equal(values.double())
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.equal(values.bfloat16())
    assert "head.weight" not in storage.masters


def test_frozen_weights_are_kept_and_not_trained():
    runtime = runtime_of(Plain(torch.bfloat16, torch.float32), frozen=["embed.weight"])
    assert runtime.step([tiny_batch()]).finite
    assert "embed.weight" not in [named.name for named in runtime.parameters()]
    assert "model/embed.weight" in [shard.name for shard in runtime.shards()]


def test_precision_parts_are_listed():
    assert [part.name for part in PARTS] == ["fp32", "fp64", "bf16", "fp16"]
