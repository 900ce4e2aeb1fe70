"""Pipeline executor: every schedule on real ranks, with losses and gradients bit-identical to one process."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from gangline.comm.solo import Done
from gangline.comm.wrap import Wrapped
from gangline.mesh import Mesh
from gangline.model import forward_context
from gangline.model.linear import Linear
from gangline.model.linear_nodes import LinearNode
from gangline_basics.explain.timeline import ActionTimes
from gangline_basics.precision.plain import Plain
from gangline_parallel_megatron_style.pipeline.action_times import UNIFORM
from gangline_parallel_megatron_style.pipeline.executor import AHEAD, Executor
from gangline_parallel_megatron_style.pipeline.rank_stages import RankStages
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES
from gangline_parallel_megatron_style.pipeline.simulate import Timeline, count_peak_activations
from gangline_parallel_megatron_style.pipeline.split_linear import split_linear
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

DIM = 8
EACH = pytest.mark.parametrize("name", sorted(SCHEDULES))


@dataclass(frozen=True)
class Case:
    name: str
    microbatches: int
    chunks: int
    dtype: torch.dtype = torch.float32
    times: tuple[ActionTimes, ...] | ActionTimes = UNIFORM
    split: bool = True  # SplitMatmul instead of autograd's own backward
    overlap: bool = False  # forward passes alternate with backward passes at every layer


class Waits(torch.autograd.Function):
    """Identity that yields to the other action, as during a transfer; notes when it starts and when it continues."""

    @staticmethod
    def forward(ctx, x, notes):
        ctx.notes = notes
        notes.append("F")
        forward_context.overlap_point()
        notes.append("f")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.notes.append("B")
        forward_context.overlap_point()
        ctx.notes.append("b")
        return grad, None


class Part(nn.Module):
    """Stage of one to three layers; only the first layer has a bias."""

    def __init__(self, stage: int, case: Case, notes: list[str] | None = None) -> None:
        super().__init__()
        self.notes = notes if case.overlap else None
        self.scale = nn.Parameter(torch.empty(DIM))
        node = LinearNode(in_features=DIM, out_features=DIM)
        self.layers = nn.ModuleList(Linear(replace(node, bias=i == 0)) for i in range(1 + stage % 3))
        generator = torch.Generator().manual_seed(stage)
        self.to(case.dtype)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
        if case.split:
            for layer in self.layers:
                layer.matmul = split_linear(Plain(case.dtype, case.dtype))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x * self.scale))
            if self.notes is not None:
                x = Waits.apply(x, self.notes)
        return x


def data(microbatch: int, case: Case):
    """Return (input, target) of a microbatch; sizes differ between microbatches."""
    generator = torch.Generator().manual_seed(100 + microbatch)
    x, y = torch.randn(2, 2 + microbatch % 3, 3, DIM, generator=generator, dtype=torch.float64).to(case.dtype)
    return x, y


class Chain(RankStages):
    def __init__(self, parts: dict[int, Part], stages: dict[int, int], last: int, case: Case) -> None:
        super().__init__()
        self.parts, self.stages, self.last, self.case = parts, stages, last, case

    def forward(self, chunk, microbatch, hidden):
        x, target = data(microbatch, self.case)
        out = self.parts[chunk](x if hidden is None else hidden)
        return (out - target).square().sum() if self.stages[chunk] == self.last else out

    def backward(self, chunk, microbatch, output, grad):
        output.backward(torch.tensor(0.25, dtype=output.dtype) if grad is None else grad)

    def allocate_hidden(self, microbatch):
        return torch.empty_like(data(microbatch, self.case)[0])


def gradients(part):
    return {name: parameter.grad for name, parameter in part.named_parameters()}


def reference(case: Case, stages: int):
    """Return (losses, gradients of each stage) of one process."""
    parts, losses = [Part(stage, case) for stage in range(stages)], []
    for microbatch in range(case.microbatches):
        x, target = data(microbatch, case)
        for part in parts:
            x = part(x)
        loss = (x - target).square().sum()
        (loss * 0.25).backward()
        losses.append(loss.detach())
    return losses, [gradients(part) for part in parts]


def executor(case: Case, clock=None):
    comm = rank.make_comms(Mesh.of({"pp": rank.world})).get_comm("pp")
    stages = {}
    stage = Chain({}, stages, rank.world * case.chunks - 1, case)
    made = Executor(stage, comm, case.name, chunks=case.chunks, times=case.times, overlap=case.overlap)
    made.clock, made.notes = clock, []
    schedule = made.get_schedule(case.microbatches)
    for chunk in range(case.chunks):
        stages[chunk] = schedule.get_stage(comm.index, chunk)
        made.stage.parts[chunk] = Part(stages[chunk], case, made.notes)
    return made


def check(case: Case):
    """Compare with one process on the ranks themselves, so that no gradients need a transfer."""
    made = executor(case)
    want_losses, want = reference(replace(case, split=False), rank.world * case.chunks)
    before = made.evaluate(case.microbatches)
    for _ in range(2):
        for part in made.stage.parts.values():
            part.zero_grad()
        losses = made.step(case.microbatches)
        holds_last = rank.world * case.chunks - 1 in made.stage.stages.values()
        assert len(losses) == len(before) == (case.microbatches if holds_last else 0)
        for got in (losses, before):
            assert all(a.equal(b) and not a.requires_grad for a, b in zip(got, want_losses if got else [], strict=True))
        for chunk, stage in made.stage.stages.items():
            for name, got in gradients(made.stage.parts[chunk]).items():
                assert got.equal(want[stage][name]), f"stage {stage}, {name}"
        assert len(made.stage.deferred) == 0
    return len(losses)


@EACH
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.nightly)], ids=["float32", "float64"]
)
def test_step_is_bit_identical_to_one_process(name, world, dtype):
    for microbatches in (1, 3, 9):
        chunks = 3 if name == "interleaved_1f1b" and microbatches == 3 else SCHEDULES[name].chunks
        found = get_pool(world).run(check, Case(name, microbatches, chunks, dtype))
        assert sorted(found) == [0] * (world - 1) + [microbatches]


def test_layers_without_deferral_match_one_process():
    get_pool(2).run(check, Case("zb_v", 5, 2, split=False))


def test_action_times_keep_results_bit_identical():
    times = tuple(ActionTimes(F=1 + stage % 2, I=1.5 + stage, W=0.7) for stage in range(4))
    get_pool(2).run(check, Case("zb_v", 6, 2, times=times))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 9])
def test_overlap_is_bit_identical_to_one_process(world, microbatches):
    get_pool(world).run(check, Case("dualpipe_v", microbatches, 2, overlap=True))


def noting(case: Case):
    made = executor(case)
    made.step(case.microbatches)
    return "".join(made.notes), made.get_schedule(case.microbatches), rank.index


def test_overlap_alternates_forward_and_backward_at_waits():
    """Check that between start (F, B) and end (f, b) of a wait, the other action computes up to a wait of its own."""
    for notes, schedule, index in get_pool(2).run(noting, Case("dualpipe_v", 8, 2, overlap=True)):
        pairs = sum(rank == index for rank, _ in schedule.pairs)
        assert notes.count("FB") + notes.count("BF") >= pairs > 8
        assert notes.count("F") == notes.count("f")
        assert notes.count("B") == notes.count("b")
    for notes, _, _ in get_pool(2).run(noting, Case("1f1b", 8, 1, overlap=True)):
        assert "FB" not in notes
        assert "BF" not in notes


def failing_lane(case: Case, kind: str):
    """Fail an action that overlaps another one, and return whether the next step is correct."""
    made = executor(case)
    sound = getattr(made.stage, kind)
    calls = 0

    def fails(chunk, microbatch, *rest):
        nonlocal calls
        calls += 1
        if calls == 6:
            forward_context.overlap_point()
            raise ArithmeticError(kind)
        return sound(chunk, microbatch, *rest)

    setattr(made.stage, kind, fails)
    with pytest.raises(ArithmeticError, match=kind):
        made.step(case.microbatches)
    setattr(made.stage, kind, sound)
    for part in made.stage.parts.values():
        part.zero_grad()
    made.step(case.microbatches)
    want = reference(replace(case, overlap=False), 2)[1]
    return all(
        got.equal(want[stage][name])
        for chunk, stage in made.stage.stages.items()
        for name, got in gradients(made.stage.parts[chunk]).items()
    )


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_failed_action_ends_its_overlapped_action(kind):
    assert get_pool(1).run(failing_lane, Case("dualpipe_v", 6, 2, overlap=True), kind) == [True]


def changing(case: Case):
    made = executor(case)
    return [len(made.step(microbatches)) for microbatches in (1, 4, 2)] + [
        len(made.evaluate(microbatches)) for microbatches in (3, 1)
    ]


def test_microbatch_count_may_change_each_step():
    assert get_pool(2).run(changing, Case("1f1b", 4, 1)) == [[0] * 5, [1, 4, 2, 3, 1]]


def held(case: Case):
    """Return (maximum number of outputs alive at once, number that the schedule allows on this rank)."""
    made, outputs, most = executor(case), [], 0
    forward = made.stage.forward

    def counted(chunk, microbatch, hidden):
        nonlocal most
        out = forward(chunk, microbatch, hidden)
        outputs.append(weakref.ref(out))
        most = max(most, sum(ref() is not None for ref in outputs))
        return out

    made.stage.forward = counted
    made.step(case.microbatches)
    assert not any(ref() is not None for ref in outputs), "activations outlive the step"
    return most, count_peak_activations(made.get_schedule(case.microbatches))[rank.index]


@EACH
def test_activations_are_freed_after_their_backward(name):
    case = Case(name, 8, SCHEDULES[name].chunks)
    for most, allowed in get_pool(4).run(held, case):
        assert 1 <= most <= allowed
        assert most == allowed or SCHEDULES[name].splits_backward  # I frees the graph, W keeps only its inputs


class InOrder(Wrapped):
    """Communicator that ends each transfer before the next, as on one NCCL stream, and records sent tensors."""

    def __init__(self, inner):
        super().__init__(inner)
        self.sent, self.most = [], 0

    def _exchange(self, sends, recvs, background):
        self.inner.exchange(sends, recvs)
        self.sent += [weakref.ref(tensor) for tensor, _ in sends]
        self.most = max(self.most, sum(ref() is not None for ref in self.sent))
        return Done([into for into, _ in recvs])


def in_order(case: Case):
    made = executor(case)
    made.comm = InOrder(made.comm)
    made.step(case.microbatches)
    most = made.comm.most
    made.evaluate(case.microbatches)
    assert not any(ref() is not None for ref in made.comm.sent), "a sent tensor outlives the step"
    assert made.comm.most <= max(most, 2 * (AHEAD + 1)), "an evaluation piles up what it sends to its two neighbours"
    return len(made.comm.sent), most


@EACH
def test_serial_transfers_do_not_deadlock_or_accumulate(name):
    found = [get_pool(4).run(in_order, Case(name, microbatches, SCHEDULES[name].chunks)) for microbatches in (8, 16)]
    for (few, _), (many, _) in zip(*found, strict=True):
        assert many == 2 * few > 0
    if name != "gpipe":
        assert [most for _, most in found[0]] == [most for _, most in found[1]]


def ticking(case: Case):
    ticks = iter(range(10**6))
    made = executor(case, lambda: float(next(ticks)))
    made.step(case.microbatches)
    return made.spans


def test_executor_records_action_times():
    case = Case("zb_h1", 3, 1)
    spans = get_pool(2).run(ticking, case)
    found = Timeline(get_pool(2).run(scheduled, case)[0], tuple(spans))
    assert [len(each) for each in spans] == [9, 9]
    assert found.compute_busy_time(0) == 9
    assert spans[0][:2] == ((0.0, 1.0), (2.0, 3.0))


def scheduled(case: Case):
    return executor(case).get_schedule(case.microbatches)


def unused(case: Case):
    made = executor(case)
    made.stage.forward = lambda chunk, microbatch, hidden: (
        torch.ones(2, 3, DIM, requires_grad=True).sum() if hidden is not None else data(microbatch, case)[0] * 1.0
    )
    made.stage.allocate_hidden = lambda microbatch: torch.empty_like(data(microbatch, case)[0])
    made.step(1)


def test_error_names_stage_that_ignores_its_input():
    with pytest.raises(RuntimeError, match="stage 1 computed no gradient of its input in microbatch 0"):
        get_pool(2).run(unused, Case("1f1b", 1, 1))


def failing(case: Case):
    """Fail a step between I and W; return (number of deferred closures left, whether the next step is correct)."""
    made = executor(case)
    weights = made.stage.compute_weight_grads

    def fail(chunk, microbatch):
        raise ArithmeticError

    made.stage.compute_weight_grads = fail
    with pytest.raises(ArithmeticError):
        made.step(1)
    left = len(made.stage.deferred)
    made.stage.compute_weight_grads = weights
    for part in made.stage.parts.values():
        part.zero_grad()
    made.step(1)
    want = reference(case, 1)[1][0]
    return left, all(got.equal(want[name]) for name, got in gradients(made.stage.parts[0]).items())


def test_step_after_a_failed_step_is_correct():
    (found,) = get_pool(1).run(failing, Case("zb_h1", 1, 1))
    assert found == (1, True)
