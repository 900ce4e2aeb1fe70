"""Losses, metrics, random draws, buffers, folds and unused weights of modules: `ddp` against one process."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from gangline.batch import Batch
from gangline.config.sections import Recompute
from gangline.mesh import Mesh
from gangline.model.build import materialise
from gangline.model.compose import Composed
from gangline.model.forward_context import draw, emit_loss, emit_metric
from gangline.model.init import list_shards
from gangline.model.linear import Linear
from gangline.model.linear_nodes import LinearNode
from gangline.plan import Fold, Init, Plan, ShardRule
from gangline.runtime import Job
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.gradients.config import SumGradients
from gangline_basics.parallel.config import Ddp, Single
from gangline_basics.parallel.ddp import build as build_ddp
from gangline_basics.parallel.single import build as build_single
from gangline_basics.precision.plain import Plain
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

D, T, GLOBAL, VOCABULARY = 8, 5, 8, 16


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, D))

    def forward(self, batch):
        return self.weight[batch.tokens]


class Part(nn.Module):
    """Module on a fold, which records the communicators it is bound to."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, D, D))
        self.bound = []

    def bind(self, comm):
        self.bound.append(comm)


class Block(nn.Module):
    """Block that emits, draws, sums its load in a buffer, and uses one weight only in every other pair of samples."""

    def __init__(self):
        super().__init__()
        self.linear = Linear(LinearNode(in_features=D, out_features=D))
        self.gate = Linear(LinearNode(in_features=D, out_features=D))
        self.part = Part()
        self.sometimes = nn.Parameter(torch.empty(D))
        self.never = nn.Parameter(torch.empty(D))
        self.register_buffer("seen", torch.empty(D))
        self.told = []

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        out = self.linear(hidden) * (draw(hidden, "drop") > 0.3).to(hidden.dtype)
        out = out + sum(torch.matmul(hidden, matrix) for matrix in self.part.weight)
        gate = self.gate(hidden)
        assert gate.dtype == self.gate.weight.dtype
        rows = (batch.sample // 2 + batch.step) % 2 == 1
        if rows.any():
            out = out + self.sometimes * rows[:, None, None]
        out = emit_loss(hidden + out, gate.square().sum().to(hidden.dtype), "gate")
        emit_metric("load", gate.detach().sum((0, 1)))
        emit_metric("tokens", torch.tensor(float(hidden.shape[0] * hidden.shape[1])))
        emit_metric("highest", gate.detach().max(), "max")
        emit_metric("typical", gate.detach().mean(), "mean")
        if (batch.sample == GLOBAL - 1).any():
            emit_metric("rare", torch.ones(()))  # only one microbatch of one rank emits this metric
        return out

    def after_step(self, totals):
        self.told.append({name: value.clone() for name, value in totals.items()})
        self.seen += totals["load"].to(self.seen.dtype)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, D))

    def forward(self, hidden, batch):
        logits = (hidden @ self.weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        return (loss * batch.loss_mask.flatten()).sum()


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = Embed(), Head()
        self.blocks = nn.ModuleList([Block(), Block()])


PLAN = Plan(
    embed="embed",
    blocks="blocks",
    head="head",
    layers=2,
    sharding=(ShardRule("blocks.*.part.weight", 0, "parts"),),
    inits=(Init("*", "normal", 0.3),),
    folds=(Fold("parts", 2, ("dp_replicate", "tp")),),
    master_dtype=("blocks.*.gate",),
)


def batch_of(samples: range, step: int) -> Batch:
    tokens = torch.stack(
        [torch.randint(0, VOCABULARY, (T + 1,), generator=torch.Generator().manual_seed(i)) for i in samples]
    )
    mask = torch.stack([torch.arange(T) <= i % T for i in samples])
    position = torch.arange(T).expand(len(samples), T)
    return Batch(tokens[:, :-1], tokens[:, 1:], mask, position, torch.tensor(list(samples)), step=step)


@dataclass(frozen=True)
class Case:
    parallel: Single | Ddp
    micro: int = 2
    recompute: Recompute = Recompute.none
    compute: torch.dtype = torch.float64
    kept: torch.dtype = torch.float64


def built(case: Case, kind: type[nn.Module] = Toy, plan: Plan = PLAN):
    """Build the runtime and the model without initial weights."""
    mesh = Mesh.of(case.parallel.size_axes(rank.world))
    run = SimpleNamespace(seed=1, deterministic=True, gradients=SumGradients())
    with torch.device("meta"):
        model = kind()
    build = build_single if isinstance(case.parallel, Single) else build_ddp
    precision, finish = Plain(case.compute, case.kept), make_finish(case.recompute, False)
    job = Job(Composed(run, None, plan), mesh, rank.make_comms(mesh), precision, finish)
    job.model = model
    return build(case.parallel, job), model


def runtime_of(case: Case):
    runtime, model = built(case)
    for shard in runtime.shards():
        generator = torch.Generator().manual_seed(len(shard.name))
        shard.local.copy_(torch.randn(shard.global_shape, generator=generator, dtype=torch.float64) * 0.3)
    return runtime, model


def train(case: Case) -> dict:
    runtime, model = runtime_of(case)
    index, width = runtime.data_coordinate
    share = GLOBAL // width
    metrics = []
    for step in range(3):
        first = index * share
        result = runtime.step(
            [batch_of(range(i, i + case.micro), step) for i in range(first, first + share, case.micro)]
        )
        metrics.append(result.metrics)
        gradients = {named.name: named.pieces[0].tensor.grad.clone() for named in runtime.parameters()}
        runtime.finish_update()
    told = [block.told for block in model.blocks]
    buffers = {shard.name: shard.local.clone() for shard in runtime.shards() if "seen" in shard.name}
    bound = [(comm.size, comm.axis) for block in model.blocks for comm in block.part.bound]
    return {
        "metrics": metrics,
        "told": told,
        "buffers": buffers,
        "weights": {shard.name: shard.local.clone() for shard in runtime.shards()},
        "gradients": gradients,
        "loss": result.loss_sum,
        "bound": bound,
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("recompute", list(Recompute))
def test_ddp_losses_and_metrics_match_one_process(world, recompute):
    (reference,) = get_pool(1).run(train, Case(Single(groups=world)))
    for found in get_pool(world).run(train, Case(Ddp(bucket_mb=0.001), recompute=recompute)):
        assert found["metrics"] == reference["metrics"]
        assert found["loss"] == reference["loss"]
        for ours, theirs in zip(found["told"], reference["told"], strict=True):
            assert len(ours) == 3
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.keys() == other.keys()
                assert all(mine[name].equal(other[name]) for name in mine)
        for part in ("buffers", "gradients"):
            assert found[part].keys() == reference[part].keys()
            assert all(found[part][name].equal(reference[part][name]) for name in found[part])


def test_metrics_use_declared_reduction_over_microbatches():
    (found,) = get_pool(1).run(train, Case(Single()))
    (whole,) = get_pool(1).run(train, Case(Single(), micro=8))
    first, other = found["metrics"][0], whole["metrics"][0]
    tokens = sum(i % T + 1 for i in range(GLOBAL))
    assert first["blocks.0/tokens"] == GLOBAL * T
    assert first["blocks.0/rare"] == 1.0
    assert len(first["blocks.1/load"]) == D
    for name in first:
        assert first[name] == pytest.approx(other[name], rel=1e-12), name
    told = found["told"][0][0]
    assert told["gate"].item() == first["blocks.0/gate"] > 0
    assert first["blocks.0/gate"] * tokens > 1  # a sum over tokens, divided by their number only once


def test_emitted_loss_is_divided_by_global_tokens():
    """Compare with the gradient of sum((x Wᵀ)²) / tokens, because the gate only affects its emitted loss."""
    (found,) = get_pool(1).run(train, Case(Single()))
    batch = batch_of(range(GLOBAL), 0)
    x = found["weights"]["model/embed.weight"][batch.tokens].flatten(0, 1)
    gate = x @ found["weights"]["model/blocks.0.gate.weight"].T
    expected = 2 * gate.T @ x / batch.loss_mask.sum()
    torch.testing.assert_close(found["gradients"]["blocks.0.gate.weight"], expected)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_unused_weight_has_zero_gradient(world):
    """Use `sometimes` in some microbatches only, on two of four ranks, and `never` in none."""
    for found in get_pool(world).run(train, Case(Ddp(), micro=1)):
        assert found["gradients"]["blocks.0.never"].equal(torch.zeros(D, dtype=torch.float64))
        assert found["gradients"]["blocks.0.sometimes"].abs().max() > 0


def test_ddp_binds_each_fold_module_once():
    for found in get_pool(2).run(train, Case(Ddp())):
        assert found["bound"] == [(1, "parts"), (1, "parts")]


def test_fold_without_bindable_module_is_refused():
    plan_without = Plan(**{**PLAN.__dict__, "sharding": (ShardRule("embed.weight", 0, "parts"),)})
    with pytest.raises(TypeError, match=r"embed\.weight is sharded along the fold 'parts', but no module"):
        built(Case(Single()), plan=plan_without)


def test_master_dtype_modules_compute_in_master_dtype():
    """Assert in the block that the gate's output has the dtype of its weight, while other modules use bfloat16."""
    case = Case(Single(), compute=torch.bfloat16, kept=torch.float32)
    (found,) = get_pool(1).run(train, case)
    assert {gradient.dtype for gradient in found["gradients"].values()} == {torch.float32}
    (dtypes,) = get_pool(1).run(dtypes_of, case)
    assert dtypes["blocks.0.gate.weight"] == torch.float32
    assert dtypes["blocks.0.linear.weight"] == torch.bfloat16


def dtypes_of(case: Case) -> dict:
    _, model = runtime_of(case)
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


class Shared(Toy):
    """Model whose blocks share one buffer."""

    def __init__(self):
        super().__init__()
        self.blocks[1].seen = self.blocks[0].seen


def test_buffer_shared_by_blocks_is_stored_once():
    runtime, model = built(Case(Single(), compute=torch.float32, kept=torch.float32), Shared)
    assert [name for name in runtime.registry if "seen" in name] == ["model/blocks.0.seen"]
    (kept,) = [shard.local for shard in runtime.shards() if "seen" in shard.name]
    kept.fill_(3)
    assert all(torch.equal(block.seen, torch.full((D,), 3.0)) for block in model.blocks)


def test_full_model_keeps_shared_buffer():
    with torch.device("meta"):
        model = Shared()
    materialise(model, PLAN)
    assert not model.blocks[0].seen.is_meta
    assert model.blocks[1].seen is model.blocks[0].seen
    assert [shard.name for shard in list_shards(model, PLAN) if "seen" in shard.name] == ["model/blocks.0.seen"]


class Lost(Toy):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.empty(3), persistent=False)


def test_non_persistent_buffer_is_refused():
    with pytest.raises(
        ValueError, match="the buffer table is not persistent, so neither initialization nor checkpoints fill it"
    ):
        built(Case(Single()), Lost)
