"""Closed forms of bytes sent by a rank, compared with the runtime on a transport that counts."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
import torch

from gangline.batch import Batch
from gangline.config.compose import compose_one
from gangline.mesh import Mesh
from gangline.model.compose import Composed, compose_model
from gangline.plugin import registry
from gangline.runtime import Job
from gangline.train.recompute_and_compile import make_finish
from gangline_parallel_megatron_style.cost import traffic
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.explain.fake_comms import FakeComms
from gangline_testkit.inputs import make_full_batch

TINY = (
    "model.layers=2 model.dim=32 model.heads=4 model.ffn_dim=48 model.vocab_size=37 "
    "batch.global_size=8 batch.sequence_length=16"
)


def microbatch(case: Case) -> Batch:
    return make_full_batch(torch.zeros(case.micro_size, case.sequence_length, dtype=torch.int64))


def counted(words: str, stage: int, every: int = 1) -> tuple[Case, Mesh, list[FakeComms]]:
    """Run one step on every `every`-th data rank of a stage, one rank after another; return case, mesh and traffic."""
    run = compose_one([*TINY.split(), *words.split()])
    mesh = Mesh.of(run.parallel.size_axes(run.launch.processes or run.parallel.count_ranks(0)))
    case, found = Case.of(run, mesh), []
    tree, plan = compose_model(run)
    points = list(mesh.iterate_along({"pp": stage}, ("dp_replicate", "dp_shard", "cp")))
    for point in points[::every]:
        comms = FakeComms(mesh, mesh.rank(point))
        finish = make_finish(run.job.recompute, False, run.job.recompute_every, plan.seams)
        precision = registry.build(run.precision, run)
        runtime = registry.build(run.parallel, Job(Composed(run, tree, plan), mesh, comms, precision, finish))
        comms.traffic.bytes.clear()  # leave out the traffic of the setup
        comms.traffic.calls.clear()
        runtime.step([microbatch(case)] * case.microbatches)
        found.append(comms)
    return case, mesh, found


def sent(comms: FakeComms, mesh: Mesh) -> Counter[str]:
    """Return the bytes that a rank sends with ring algorithms, by axis; the axis "world" is all axes together."""
    found: Counter[str] = Counter()
    for (axis, operation), handed in comms.traffic.bytes.items():
        n = mesh.world if axis == "world" else mesh.size(*axis.split("+"))
        share = {
            "all_gather": Fraction(n - 1),
            "reduce_scatter": Fraction(n - 1, n),
            "all_to_all": Fraction(n - 1, n),
            "all_reduce": Fraction(2 * (n - 1), n),
            "exchange": Fraction(1),
        }[operation]
        found[axis] += int(handed * share)
    return found


TENSOR = ("hidden states in blocks", "gradients in blocks", "embedding", "loss")
WHOLE = ("gradients of replicated parameters",)  # some data ranks hold rows of these arrays and others hold none
CONTEXT = ("attention", "positions")
PIPELINE = ("hidden states and gradients", "tied embedding")
DATA = ("gradients", "weights")


def closed(case: Case, stage: int, purposes: tuple[str, ...]) -> int:
    """Return the bytes of the closed form for these purposes."""
    return sum(sent.bytes for sent in traffic.list_sent(case, stage) if sent.purpose in purposes)


LAYOUTS = [
    "parallel=3d",
    "parallel=3d parallel.sequence_parallel=false",
    "parallel=3d run.recompute=full",
    "parallel=3d run.recompute=full run.recompute_every=2 model.tied=false",
    "parallel=3d parallel.sequence_parallel=false run.recompute=full precision=bf16",
    "parallel=3d parallel.schedule=interleaved_1f1b model.qk_norm=true model.layers=4",
    "parallel=3d parallel.zero=3 precision=bf16",
    "parallel=3d parallel.zero=2 parallel.dp_shard=1 parallel.dp_replicate=2",
    "parallel=tp launch.processes=4 model.kv_heads=1 model.sinks=true model.soft_cap=2.0",
    "parallel=fsdp launch.processes=4 precision=bf16",
    "parallel=fsdp launch.processes=4 parallel.zero=2 batch.micro_size=1",
    "parallel=fsdp launch.processes=4 parallel.zero=0",
    "parallel=hsdp launch.processes=8",
    "parallel=hsdp launch.processes=8 parallel.zero=0",
    "parallel=hsdp launch.processes=4 parallel.dp_shard=2 batch.micro_size=1",
    "parallel=hsdp launch.processes=4 parallel.dp_shard=2 batch.micro_size=1 parallel.zero=2 gradients=bf16",
    "parallel=3d launch.processes=8 parallel.pp=1 parallel.cp=2 model.window=9 model.full_every=2 model.z_loss=0.1",
    "parallel=3d launch.processes=8 parallel.pp=1 parallel.cp=2 parallel.context=ulysses precision=bf16",
    "parallel=3d launch.processes=8 parallel.pp=1 parallel.tp=1 parallel.cp=4 run.recompute=full model.kv_heads=1",
    "parallel=fsdp launch.processes=8 parallel.cp=4 parallel.context=ulysses run.recompute=selective model.ffn_dim=96",
]


@pytest.mark.parametrize("words", LAYOUTS)
def test_sent_bytes_match_closed_form(words):
    for stage in (0, 1):
        case, mesh, ranks = counted(words, stage, every=3)
        for comms in ranks:
            found = sent(comms, mesh)
            assert found["pp"] == closed(case, stage, PIPELINE)
            assert found["cp"] == closed(case, stage, CONTEXT)
            summed = comms.traffic.bytes["tp", "all_reduce"] if case.sequence_parallel else 0
            whole = summed * 2 * (case.tp - 1) // case.tp
            assert found["tp"] - whole == closed(case, stage, TENSOR)
            data = closed(case, stage, DATA)
            moved = found["dp_shard+cp"] + found["dp_replicate"] + found["world"]
            assert data <= moved <= 1.1 * data + 100  # padding of the last range of a buffer; norm and loss
        if mesh.size("pp") == 1:
            break


@pytest.mark.parametrize("words", ["parallel=3d", "parallel=tp launch.processes=4 model.kv_heads=1"])
def test_replicated_gradient_bytes_over_tp_match_closed_form(words):
    case, mesh, ranks = counted(words, 0)
    summed = sum(comms.traffic.bytes["tp", "all_reduce"] for comms in ranks)
    n = mesh.size("tp")
    assert closed(case, 0, WHOLE) * len(ranks) == summed * 2 * (n - 1) // n


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_all_reduce_gradients_once_per_step(zero):
    words = f"parallel=hsdp launch.processes=4 parallel.dp_shard=2 batch.micro_size=1 parallel.zero={zero}"
    case, _, (comms, *_) = counted(words, 0)
    assert case.microbatches == 2
    of = {(*sent.axes, sent.purpose): sent.calls for sent in traffic.list_sent(case, 0)}
    assert comms.traffic.calls["dp_replicate", "all_reduce"] == of["dp_replicate", "gradients"] == len(case.blocks) + 2


@pytest.mark.parametrize("words", LAYOUTS[:6])
def test_collective_calls_match_closed_form(words):
    case, _, (comms, *_) = counted(words, 0)
    of = {(*sent.axes, sent.purpose): sent.calls for sent in traffic.list_sent(case, 0)}
    calls = comms.traffic.calls
    assert calls["dp_shard+cp", "reduce_scatter"] == of["dp_shard", "gradients"]
    assert calls["dp_shard+cp", "all_gather"] == of["dp_shard", "weights"]
    in_tp = sum(count for (axis, _), count in calls.items() if axis == "tp")
    whole = calls["tp", "all_reduce"] if case.sequence_parallel else 0
    assert in_tp - whole == sum(of.get(("tp", purpose), 0) for purpose in TENSOR)


MUON = [
    "parallel=fsdp launch.processes=4",
    "parallel=fsdp launch.processes=4 parallel.zero=0 model.layers=3",
    "parallel=hsdp launch.processes=4 parallel.dp_shard=2 model.layers=3",
    "parallel=3d launch.processes=8 precision=fp64",
]


@pytest.mark.parametrize("words", MUON)
def test_muon_all_to_all_bytes_match_closed_form(words, monkeypatch):
    """Compare the sum over all ranks of a stage, because ranks send different amounts, in several batches."""
    monkeypatch.setattr("gangline_basics.parallel.owners.LIMIT", 20_000)
    run = compose_one([*TINY.split(), "optimizer=muon", *words.split()])
    mesh = Mesh.of(run.parallel.size_axes(run.launch.processes or run.parallel.count_ranks(0)))
    case, (tree, plan) = Case.of(run, mesh), compose_model(run)
    for stage in range(mesh.size("pp")):
        handed, calls = 0, set()
        points = list(mesh.iterate_along({"pp": stage}, ("dp_replicate", "dp_shard", "cp", "tp")))
        for point in points:
            comms, precision = FakeComms(mesh, mesh.rank(point)), registry.build(run.precision, run)
            finish = make_finish(run.job.recompute, False)
            runtime = registry.build(run.parallel, Job(Composed(run, tree, plan), mesh, comms, precision, finish))
            optimizer = registry.build(run.optimizer, run, runtime)
            runtime.step([microbatch(case)] * case.microbatches)
            before = Counter(comms.traffic.bytes), Counter(comms.traffic.calls)
            optimizer.step(1e-3)
            handed += sum(
                count for (_, what), count in (comms.traffic.bytes - before[0]).items() if what == "all_to_all"
            )
            calls.add(
                sum(count for (_, what), count in (comms.traffic.calls - before[1]).items() if what == "all_to_all")
            )
        (sent,) = [sent for sent in traffic.list_sent(case, stage) if sent.purpose == "optimizer matrices"]
        assert {sent.calls} == calls
        assert 0 <= handed - sent.bytes * len(points) < len(points) * sent.calls, "but for rounding"
        assert sent.calls > 2
