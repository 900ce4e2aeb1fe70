"""A small decoder sharded over tp by hand: what each rank computes, and how the shards are assembled."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from gangline.batch import Batch
from gangline.comm.base import Comm
from gangline.config.sections import Recompute
from gangline.mesh import Mesh
from gangline.model.init import make_whole_model
from gangline.model.linear import Linear
from gangline.plan import Plan
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.plan import plan_decoder
from gangline_basics.model.seams import get_calls
from gangline_basics.precision.plain import Plain
from gangline_parallel_megatron_style.tensor.apply import cut_modules
from gangline_testkit import rank

ROWS, LENGTH = 2, 8


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.float64
    sequence_parallel: bool = False
    vocab_size: int = 37
    kv_heads: int = 4
    tied: bool = False
    qk_norm: bool = False
    bias: bool = False
    recompute: Recompute = Recompute.none
    whole: tuple[str, ...] = ()  # patterns whose shard rules the plan loses
    layers: int = 2
    microbatches: int = 1

    def config(self) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=self.vocab_size,
            dim=32,
            layers=self.layers,
            heads=4,
            kv_heads=self.kv_heads,
            ffn_dim=48,
            tied=self.tied,
            qk_norm=self.qk_norm,
            init_std=0.1,
        )

    def built(self):
        tree, plan = plan_decoder(self.config())
        return tree, replace(plan, sharding=tuple(rule for rule in plan.sharding if rule.pattern not in self.whole))


@dataclass
class Found:
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def batch_of(case: Case, number: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, case.vocab_size, (ROWS, LENGTH + 1), generator=generator)
    mask = torch.rand(ROWS, LENGTH, generator=generator) < 0.8
    position = torch.arange(LENGTH).expand(ROWS, LENGTH)
    return Batch(tokens[:, :-1], tokens[:, 1:], mask, position, torch.arange(ROWS))


def whole_of(case: Case, dtype: torch.dtype | None = None) -> tuple[torch.nn.Module, Plan]:
    """Return the unsharded model and its plan.

    With `bias`, linear layers get random biases, which decoders do not have.
    """
    tree, plan = case.built()
    model = make_whole_model(tree, plan, seed=1, dtype=torch.float64)
    if case.bias:
        generator = torch.Generator().manual_seed(5)
        for module in model.modules():
            if isinstance(module, Linear):
                values = torch.randn(module.weight.shape[0], generator=generator, dtype=torch.float64)
                module.bias = torch.nn.Parameter(values * 0.1)
    return model.to(dtype or case.dtype), plan


def extent(case: Case, plan: Plan, name: str, rows: int, index: int, n: int) -> tuple[int, int, int]:
    """Return (dim, first, end) of the slice that rank `index` of `n` holds of a sharded matrix.

    rows: size of the matrix along the sharded dim
    """
    rule = plan.get_shard_rules(name, 2)["tp"]
    if name.split(".")[-2] in ("wk", "wv") and case.kv_heads < n:
        each = rows // case.kv_heads
        head = index * case.kv_heads // n
        return rule.dim, head * each, (head + 1) * each
    each = -(-rows // n)
    return rule.dim, min(rows, index * each), min(rows, (index + 1) * each)


def cut_model(case: Case, comm: Comm, dtype: torch.dtype | None = None):
    """Return this rank's shard of the model, with sliced parameters and with matmuls and seams for tp, and the plan."""
    model, plan = whole_of(case, dtype)
    losses = get_calls(case.built()[0], plan, "loss")
    made: dict[int, torch.nn.Parameter] = {}
    first_rows = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner = plan.get_owner(name)
        rule = plan.get_shard_rules(owner, parameter.dim()).get("tp")
        if id(parameter) not in made:
            part = parameter.detach()
            if rule is not None:
                dim, first, end = extent(case, plan, owner, part.shape[rule.dim], comm.index, comm.size)
                part = part.narrow(dim, first, end - first).clone()
                first_rows[owner] = first
            made[id(parameter)] = torch.nn.Parameter(part)
            if part.dtype == torch.bfloat16:
                made[id(parameter)].grad_dtype = torch.float32
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, made[id(parameter)])
    wide = torch.float32 if (dtype or case.dtype) == torch.bfloat16 else dtype or case.dtype
    precision = Plain(dtype or case.dtype, wide)
    cut_modules(
        model, plan, comm, precision, sequence_parallel=case.sequence_parallel, first_rows=first_rows, losses=losses
    )
    finish = make_finish(case.recompute, False, seams=plan.seams)
    for index, block in enumerate(model.blocks):
        finish(block, f"blocks.{index}")
    return model, plan


def tp() -> Comm:
    return rank.make_comms(Mesh.of({"tp": rank.world})).get_comm("tp")


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trained(case: Case, model: torch.nn.Module) -> Found:
    """Run all microbatches forward, then all backward, first to last, and return losses and gradients."""
    losses = [model(batch_of(case, number)) for number in range(case.microbatches)]
    for loss in losses:
        (loss * 0.125).backward()
    return Found([loss.detach() for loss in losses], gradients_of(model))


def one_rank(case: Case) -> Found:
    """Return the losses and gradients of this rank's shard of the model."""
    return trained(case, cut_model(case, tp())[0])


def one_process(case: Case, dtype: torch.dtype | None = None) -> Found:
    """Return the losses and gradients of the unsharded model."""
    model, _ = whole_of(case, dtype)
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.grad_dtype = torch.float32
    return trained(case, model)


def assembled(case: Case, ranks: list[Found], reference: Found) -> dict[str, torch.Tensor]:
    """Return the gradients in the global view, assembled from all ranks.

    Shards are added at their offsets. Replicated gradients are added if each rank has only a part of the sum; otherwise
    they must be equal.
    """
    _, plan = case.built()
    found = {}
    for name, whole in reference.gradients.items():
        total = torch.zeros_like(whole)
        rule = plan.get_shard_rules(name, whole.dim()).get("tp")
        if rule is not None:
            for index, one in enumerate(ranks):
                dim, first, end = extent(case, plan, name, whole.shape[rule.dim], index, len(ranks))
                total.narrow(dim, first, end - first).add_(one.gradients[name])
        elif case.sequence_parallel or any(name.startswith("blocks") and part in name for part in ("q_norm", "k_norm")):
            total = sum((one.gradients[name] for one in ranks), total)
        else:
            assert all(one.gradients[name].equal(ranks[0].gradients[name]) for one in ranks), name
            total = ranks[0].gradients[name]
        found[name] = total
    return found


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()
