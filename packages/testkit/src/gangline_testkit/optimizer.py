"""Conformance suite for optimizers (group `optimizer`): sharded parameters, layouts, and state in checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from gangline.mesh import Mesh
from gangline.model.compose import compose_model
from gangline.optimizer import Optimizer
from gangline.plugin.registry import installed, load
from gangline.runtime import Runtime
from gangline.shard import Registry, name_dtype
from gangline_basics.precision.plain import Plain
from gangline_testkit import strategy_ranks as ranks
from gangline_testkit.claims import LAYOUT, mark_capability
from gangline_testkit.compare import Held, assemble, close, compare_all
from gangline_testkit.pool import get_pool
from gangline_testkit.strategy_ranks import StrategyJob, start_rows
from gangline_testkit.suite import PartSuite
from gangline_testkit.toys.plugin import Lanes, edit_lanes

STEPS = 4
RATE = 3e-3
STACK = Lanes(lanes=3, width=1)  # three stacked one-row matrices: of four ranks, one holds no row


@dataclass
class HeldState:
    """Weights, optimizer state, counters and losses of a rank after some steps."""

    weights: list[Held]
    state: list[Held]
    counters: dict[str, Any]
    losses: list[float]


def start(job: StrategyJob) -> tuple[Runtime, Optimizer]:
    """Return (runtime, optimizer) on the strategy that the run chose, or on the toy strategy `rows` for the default."""
    strategy = installed().find_part(job.run.parallel).part
    if strategy.default:
        runtime = start_rows(job, Plain(job.dtype, job.dtype))
    else:
        runtime = ranks.start(replace(job, build=strategy.build))
    return runtime, load(job.build)(job.run.optimizer, job.run, runtime)


def list_weights(runtime: Runtime) -> list[Held]:
    """Return this rank's shards of the trained parameters, without buffers, which no optimizer updates."""
    return [
        (p.name, piece.shard.offset, piece.tensor.detach().clone()) for p in runtime.parameters() for piece in p.pieces
    ]


def state_of(optimizer: Optimizer) -> list[Held]:
    return [(shard.name, shard.offset, shard.local.detach().clone()) for shard in optimizer.shards()]


def train_steps(
    job: StrategyJob, runtime: Runtime, optimizer: Optimizer, first: int, last: int, rate: float = RATE
) -> list[float]:
    """Train on one repeated batch for steps `first` to `last` - 1, and return the mean loss of each step."""
    losses = []
    for _ in range(first, last):
        result = runtime.step(job.share(0, *runtime.data_coordinate))
        losses.append(result.loss_sum / result.tokens)
        optimizer.step(rate)
        runtime.finish_update()
    return losses


def train_job(job: StrategyJob, count: int, rate: float = RATE) -> HeldState:
    runtime, optimizer = start(job)
    losses = train_steps(job, runtime, optimizer, 0, count, rate)
    return HeldState(list_weights(runtime), state_of(optimizer), optimizer.state(), losses)


def resume_job(job: StrategyJob, count: int) -> tuple[HeldState, HeldState]:
    """Train `count` steps, copy the state into a new runtime and optimizer, and train both for `count` more steps.

    Returns the final state of the uninterrupted run and of the resumed run.
    """
    runtime, optimizer = start(job)
    train_steps(job, runtime, optimizer, 0, count)
    again, other = start(job)
    with torch.no_grad():
        for shards, targets in ((runtime.shards(), again.shards()), (optimizer.shards(), other.shards())):
            for source, target in zip(list(shards), list(targets), strict=True):
                assert (source.name, source.offset) == (target.name, target.offset)
                target.local.copy_(source.local)
    other.load_state(json.loads(json.dumps(optimizer.state())))
    ends = []
    for one, steps_of in ((runtime, optimizer), (again, other)):
        losses = train_steps(job, one, steps_of, count, 2 * count)
        ends.append(HeldState(list_weights(one), state_of(steps_of), steps_of.state(), losses))
    return ends[0], ends[1]


def describe_shards(job: StrategyJob) -> tuple[Registry, list[tuple[str, tuple[int, ...], tuple[int, ...], str, bool]]]:
    """Return the registry of a new optimizer, and (name, offset, shape, dtype, primary) of its shards."""
    _, optimizer = start(job)
    shards = [
        (s.name, tuple(s.offset), tuple(s.local.shape), name_dtype(s.dtype), s.primary) for s in optimizer.shards()
    ]
    return optimizer.registry, shards


class OptimizerSuite(PartSuite):
    """Conformance suite for optimizers; subclass it with ``choice = "optimizer=mine"``.

    The model has vectors, matrices and 3-D parameters of stacked matrices. One 3-D parameter is so small that some
    ranks hold no part of it.

    worlds  numbers of ranks to test on
    """

    worlds: ClassVar[tuple[int, ...]] = (1, 2, 4)
    CLAIMS: ClassVar[dict[str, str]] = {
        LAYOUT: "Weights and state in every layout match one process (implied unless `Part.layout_dependent` is set).",
        "exact": "A step on shards is bit-identical to a step on full parameters (run.deterministic).",
    }

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "world" in metafunc.fixturenames:
            metafunc.parametrize("world", self.worlds)

    def make_job(self, world: int, dtype: torch.dtype = torch.float64, *settings: str) -> StrategyJob:
        run = self.run("run.deterministic=true", "batch.global_size=4", *settings)
        tree, plan, _ = edit_lanes(*compose_model(run), STACK)
        usual = installed().find_part(run.parallel).part.default
        mesh = Mesh.of({"dp_shard": world} if usual else run.parallel.size_axes(world))
        return StrategyJob(self.offer.part.build, run, tree, plan, mesh, dtype, "ragged")

    def assemble_state(self, world: int, count: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return (weights, state) as full arrays after `count` steps."""
        registry, _ = get_pool(1).run(describe_shards, self.make_job(1))[0]
        answers = get_pool(world).run(train_job, self.make_job(world, dtype), count)
        state = assemble([a.state for a in answers], {name: registry[name].shape for name in registry})
        shapes = {
            name: tuple(local.shape) for name, _, local in get_pool(1).run(train_job, self.make_job(1), 0)[0].weights
        }
        return assemble([a.weights for a in answers], shapes), state

    def test_state_exists_before_the_first_step(self, world: int) -> None:
        """Check that a new optimizer has its complete state, registered as optimizer/<state>/<parameter>, for loads."""
        answers = get_pool(world).run(describe_shards, self.make_job(world))
        registry = answers[0][0]
        assert all(other == registry for other, _ in answers)
        assert len(registry.layouts), "the optimizer has no state arrays; if this is intended, waive this test"
        for rank_, (_, shards) in enumerate(answers):
            for name, offset, shape, dtype, primary in shards:
                assert name.startswith("optimizer/")
                assert name.count("/") == 2
                boxes = [(box.offset, box.shape, main) for box, main in registry.list_rank_boxes(name, rank_)]
                assert (offset, shape, primary) in boxes, (
                    f"rank {rank_}: the registry has no box of {name} at {offset} with shape {shape}"
                )
                assert dtype == registry[name].dtype
        pieces = [[(n, o, torch.zeros(shape)) for n, o, shape, _, _ in shards] for _, shards in answers]
        assemble(pieces, {name: registry[name].shape for name in registry})

    @mark_capability(LAYOUT)
    def test_weights_and_state_match_one_process(self, world: int) -> None:
        """Check that weights and optimizer state after several steps match one process, within 1e-9 in float64."""
        (weights, state), (want, want_state) = (self.assemble_state(w, STEPS, torch.float64) for w in (world, 1))
        compare_all("weights", weights, want, 1e-9)
        compare_all("state", state, want_state, 1e-9)

    @mark_capability("exact")
    def test_sharded_step_is_bit_identical_to_full_step(self, world: int) -> None:
        """Check that steps with equal gradients change shards bit-identically to full arrays."""
        answers = get_pool(world).run(step_known_gradients, self.make_job(world, torch.float32), STEPS)
        (alone,) = get_pool(1).run(step_known_gradients, self.make_job(1, torch.float32), STEPS)
        shapes = {name: tuple(local.shape) for name, _, local in alone}
        compare_all("weights", assemble(answers, shapes), assemble([alone], shapes), 0)

    def test_resumed_optimizer_is_bit_identical(self, world: int) -> None:
        for straight, resumed in get_pool(world).run(resume_job, self.make_job(world, torch.float32), 2):
            assert straight.losses == resumed.losses
            assert straight.counters == resumed.counters
            for (name, _, want), (_, _, got) in zip(
                straight.weights + straight.state, resumed.weights + resumed.state, strict=True
            ):
                close(name, got, want, 0)

    def test_state_is_json_and_equal_on_all_ranks(self, world: int) -> None:
        answers = get_pool(world).run(train_job, self.make_job(world), 2)
        assert all(answer.counters == answers[0].counters for answer in answers)
        assert json.loads(json.dumps(answers[0].counters)) == answers[0].counters

    def test_may_drop_returns_no_array_of_an_unknown_state(self, world: int) -> None:
        """Check that `may_drop` returns no array of an unknown state, so that a resume refuses the checkpoint."""
        answers = get_pool(world).run(list_leftover, self.make_job(world), "unheard-of")
        assert answers == [[]] * world, (
            f"`may_drop` returns arrays of a state that the optimizer does not have: {answers}"
        )

    def test_loss_falls_on_a_repeated_batch(self) -> None:
        losses = get_pool(1).run(train_job, self.make_job(1), 12)[0].losses
        assert losses[-1] < losses[0] - 0.05, (
            f"the loss on one repeated batch must fall by 0.05: {losses[0]:.3f} -> {losses[-1]:.3f}"
        )

    def test_learning_rate_0_changes_no_weight(self) -> None:
        job = self.make_job(1)
        before, after = (get_pool(1).run(train_job, job, count, 0.0)[0].weights for count in (0, 2))
        for (name, _, was), (_, _, now) in zip(before, after, strict=True):
            close(name, now, was, 0)


def list_leftover(job: StrategyJob, state: str) -> list[str]:
    """Return the arrays optimizer/<state>/... for which `may_drop` of a new optimizer returns true."""
    runtime, optimizer = start(job)
    return sorted(optimizer.may_drop([f"optimizer/{state}/{name}" for name in runtime.names()]))


def step_known_gradients(job: StrategyJob, count: int) -> list[Held]:
    """Return weights after steps with gradients that depend only on step, name and position, not summed over ranks."""
    runtime, optimizer = start(job)
    for step in range(count):
        with torch.no_grad():
            for parameter in runtime.parameters():
                size = 1
                for length in parameter.shape:
                    size *= length
                whole = torch.sin(torch.arange(size, dtype=torch.float64) * (step + 1) + len(parameter.name))
                for piece in parameter.pieces:
                    piece.tensor.grad = (
                        whole.view(parameter.shape)[piece.shard.box.slices].to(piece.tensor.dtype).clone()
                    )
        optimizer.step(RATE)
    return list_weights(runtime)
