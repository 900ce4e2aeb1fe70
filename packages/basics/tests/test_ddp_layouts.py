"""Layout invariance of `parallel=ddp` on 1, 2 and 4 ranks, bit-identical with `run.deterministic`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from gangline.batch import Batch
from gangline.config.schema import CheckpointConfig, DataConfig, LaunchConfig, Run
from gangline.config.sections import Recompute, RunSection
from gangline.mesh import Mesh
from gangline.model.compose import Composed
from gangline.model.init import initialise
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
from gangline_basics.precision.config import Bf16, Fp32, Fp64
from gangline_basics.precision.plain import Plain
from gangline_basics.schedule.config import Constant
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

SEQUENCE, GLOBAL = 12, 8
DTYPES = {
    Fp32: (torch.float32, torch.float32),
    Fp64: (torch.float64, torch.float64),
    Bf16: (torch.bfloat16, torch.float32),
}


@dataclass(frozen=True)
class Case:
    parallel: Single | Ddp
    precision: type = Fp32
    micro: int = 2
    steps: int = 3
    deterministic: bool = True
    broken_rank: int | None = None  # rank with a NaN in its weights
    tied: bool = True


@dataclass
class Outcome:
    losses: list[tuple[float, int]]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    evaluation: tuple[float, int]
    finite: list[bool]


def run_of(case: Case) -> Run:
    model = DecoderConfig(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, tied=case.tied)
    return Run(
        model=model,
        parallel=case.parallel,
        gradients=SumGradients(),
        precision=case.precision(),
        optimizer=Adamw(),
        schedule=Constant(),
        checkpoint=CheckpointConfig(),
        data=DataConfig(),
        launch=LaunchConfig(),
        job=RunSection(seed=3, deterministic=case.deterministic),
    )


def batch_of(samples: range, step: int) -> Batch:
    """Return the batch of these samples. Samples differ in their number of valid targets, which is at least one."""
    rows, masks = [], []
    for i in samples:
        number = step * GLOBAL + i
        rows.append(torch.randint(0, 64, (SEQUENCE + 1,), generator=torch.Generator().manual_seed(number)))
        masks.append(torch.arange(SEQUENCE) < 1 + number * 5 % SEQUENCE)
    tokens = torch.stack(rows)
    position = torch.arange(SEQUENCE).expand(len(rows), SEQUENCE)
    return Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        torch.stack(masks),
        position,
        torch.tensor(list(samples)) + step * GLOBAL,
        step=step,
    )


def runtime_of(case: Case, run: Run):
    """Return the runtime of this rank, with initialized weights."""
    mesh = Mesh.of(case.parallel.size_axes(rank.world))
    tree, plan = plan_decoder(run.model)
    build = build_single if isinstance(case.parallel, Single) else build_ddp
    comms = rank.make_comms(mesh, case.deterministic)
    precision = Plain(*DTYPES[case.precision])
    runtime = build(
        case.parallel, Job(Composed(run, tree, plan), mesh, comms, precision, make_finish(Recompute.none, False))
    )
    initialise(runtime.shards(), plan, run.seed)
    return runtime


def train(case: Case) -> Outcome:
    """Train and return the results of this rank."""
    run = run_of(case)
    runtime = runtime_of(case, run)
    optimizer = build_adamw(run.optimizer, run, runtime)
    if case.broken_rank == rank.index:
        next(iter(runtime.shards())).local[0] = math.nan
    index, width = runtime.data_coordinate
    share = GLOBAL // width

    def batches(step):
        first = index * share
        return [batch_of(range(i, i + case.micro), step) for i in range(first, first + share, case.micro)]

    outcome = Outcome([], [], [], {}, (0.0, 0), [])
    for step in range(case.steps):
        result = runtime.step(batches(step))
        outcome.losses.append((result.loss_sum, result.tokens))
        outcome.gradients.append({named.name: named.pieces[0].tensor.grad.clone() for named in runtime.parameters()})
        outcome.norms.append(runtime.clip(1.0))
        outcome.finite.append(result.finite)
        if result.finite:
            optimizer.step(1e-2)
            runtime.finish_update()
    outcome.weights = {shard.name: shard.local.clone() for shard in runtime.shards()}
    outcome.evaluation = runtime.evaluate(batches(100))
    return outcome


def single(case: Case) -> Outcome:
    (outcome,) = get_pool(1).run(train, case)
    return outcome


def same_bits(one: Outcome, other: Outcome) -> None:
    assert one.losses == other.losses
    assert one.norms == other.norms
    for ours, theirs in zip(one.gradients, other.gradients, strict=True):
        assert [name for name in ours if not ours[name].equal(theirs[name])] == []
    assert [name for name in one.weights if not one.weights[name].equal(other.weights[name])] == []
    assert one.evaluation[1] == other.evaluation[1]
    assert one.evaluation[0] == pytest.approx(other.evaluation[0], rel=1e-12)


# Each value of one option occurs with each value of every other option; the remaining combinations are nightly.
MEET = [(2, Fp32, 1), (4, Fp32, 2), (2, Fp64, 2), (4, Fp64, 1), (2, Bf16, 1), (4, Bf16, 2)]
REST = [(world, precision, 3 - micro) for world, precision, micro in MEET]


@pytest.mark.parametrize(
    ("world", "precision", "micro"), [*MEET, *(pytest.param(*one, marks=pytest.mark.nightly) for one in REST)]
)
def test_ddp_matches_grouped_single_process_bit_for_bit(world, precision, micro):
    """Compare the final weights, and the gradients and norm of every step, on two and four ranks."""
    reference = single(Case(Single(groups=world), precision, micro, steps=4))
    outcomes = get_pool(world).run(train, Case(Ddp(bucket_mb=0.01), precision, micro, steps=4))
    for outcome in outcomes:
        same_bits(outcome, reference)


def test_bucket_size_does_not_change_results():
    reference, other = (get_pool(4).run(train, Case(Ddp(bucket_mb=size)))[0] for size in (0.001, 4.0))
    same_bits(reference, other)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("precision", "bound"), [(Fp64, 1e-12), (Fp32, 1e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "ordered"])
def test_ddp_matches_one_process_within_rounding(world, precision, bound, deterministic):
    """Compare step 1 with one process that adds microbatches one by one."""
    case = Case(Single(), precision, steps=1, deterministic=deterministic)
    reference = single(case)
    for outcome in get_pool(world).run(train, replace(case, parallel=Ddp())):
        assert outcome.losses[0][1] == reference.losses[0][1]
        assert outcome.losses[0][0] == pytest.approx(reference.losses[0][0], rel=bound)
        assert outcome.norms[0] == pytest.approx(reference.norms[0], rel=bound)
        for name, gradient in reference.gradients[0].items():
            difference = (outcome.gradients[0][name] - gradient).norm() / gradient.norm()
            assert difference < bound, name


def test_tied_model_has_no_head_weight():
    tied, untied = (single(Case(Single(), steps=1, tied=tied)) for tied in (True, False))
    assert set(untied.weights) - set(tied.weights) == {"model/head.weight"}
    assert "model/embed.weight" in tied.weights


def test_ranks_stay_identical_without_ordered_sums():
    outcomes = get_pool(4).run(train, Case(Ddp(), deterministic=False, steps=5))
    for outcome in outcomes[1:]:
        assert outcome.losses == outcomes[0].losses
        assert outcome.norms == outcomes[0].norms
        assert all(outcome.weights[name].equal(outcomes[0].weights[name]) for name in outcome.weights)


@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "ordered"])
def test_nan_on_one_rank_skips_step_everywhere(deterministic):
    """Check that ranks with a finite loss skip the step too if the weights of one rank contain NaN."""
    broken = get_pool(2).run(train, Case(Ddp(), steps=1, deterministic=deterministic, broken_rank=1))
    untouched = get_pool(2).run(train, Case(Ddp(), steps=0, deterministic=deterministic))
    for outcome in broken:
        assert outcome.finite == [False]
    assert all(broken[0].weights[name].equal(untouched[0].weights[name]) for name in untouched[0].weights)


def test_batch_indivisible_by_groups_is_refused():
    with pytest.raises(ValueError, match=r"4 microbatches are not divisible by parallel\.groups=3"):
        single(Case(Single(groups=3)))


def primaries(case: Case) -> list[str]:
    runtime = runtime_of(case, run_of(case))
    assert runtime.data_coordinate == (rank.index, rank.world)
    return [shard.name for shard in runtime.shards() if shard.primary]


def test_each_array_has_one_writer_across_ranks():
    found = get_pool(4).run(primaries, Case(Ddp()))
    names = [name for rank_names in found for name in rank_names]
    assert len(names) == len(set(names))
    assert all(found)
