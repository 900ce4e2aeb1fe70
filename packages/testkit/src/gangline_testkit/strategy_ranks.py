"""Functions that a rank runs for `StrategySuite`: build the runtime as core does, run it, and return raw numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gangline.batch import Batch
from gangline.comm.base import Comms
from gangline.config.schema import Run
from gangline.config.sections import Recompute
from gangline.mesh import Mesh
from gangline.model.compose import Composed
from gangline.model.init import initialise
from gangline.model.tree import Node
from gangline.plan import Plan
from gangline.plugin.registry import load
from gangline.precision import Precision
from gangline.runtime import Job as RuntimeJob, MatrixId, Runtime
from gangline.shard import Registry, name_dtype, name_model_array, parse_parameter
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.precision.plain import Plain
from gangline_testkit import rank
from gangline_testkit.compare import Clipped, Held
from gangline_testkit.inputs import share
from gangline_testkit.reference import Expected, Reference, descend
from gangline_testkit.toys.rows import RowsRuntime


@dataclass(frozen=True)
class StrategyJob:
    """Inputs of a training run with a strategy."""

    build: str
    run: Run
    tree: Node
    plan: Plan
    mesh: Mesh
    dtype: torch.dtype
    batches: str  # `gangline_testkit.inputs.Kind`
    steps: int = 3
    recompute: bool = False  # full recomputation, regardless of the run's setting
    compute: torch.dtype | None = None  # dtype of matmuls; None: `dtype`, the dtype of weights and gradients

    def make_key(self) -> str:
        """Return a key that is equal for equal jobs."""
        return repr(self)

    @property
    def vocab_size(self) -> int:
        return self.run.model.vocab_size

    def share(self, step: int, index: int, width: int) -> list[Batch]:
        """Return the microbatches of one data rank in one step."""
        batch = self.run.batch
        return share(
            step,
            index,
            width,
            size=batch.global_size,
            micro_size=batch.micro_size or batch.global_size // width,
            length=batch.sequence_length,
            vocab_size=self.vocab_size,
            kind=self.batches,
        )

    def share_for_score(self, index: int, width: int) -> list[Batch]:
        """Return a data rank's share for `score`, one sample per batch; the last global sample is padding."""
        batch = self.run.batch
        batches = share(
            self.steps,
            index,
            width,
            size=batch.global_size,
            micro_size=1,
            length=batch.sequence_length,
            vocab_size=self.vocab_size,
            kind=self.batches,
        )
        if index == width - 1:
            batches[-1].loss_mask = torch.zeros_like(batches[-1].loss_mask)
        return batches


@dataclass
class RankStep:
    """Results of one step on one rank; held: this rank's shards of the gradients."""

    loss_sum: float
    tokens: int
    finite: bool
    metrics: dict[str, Any]
    norm: float
    held: list[Held]
    own: tuple[float, int]  # (loss sum, tokens) of this rank only


@dataclass
class Trained:
    """Results of a complete job on one rank."""

    coordinate: tuple[int, int]  # `Runtime.data_coordinate`: (index, width)
    registry: Registry
    names: list[str]  # names of parameters(), in order
    first: list[Held] = field(default_factory=list)  # the initial arrays
    steps: list[RankStep] = field(default_factory=list)
    last: list[Held] = field(default_factory=list)  # the arrays at the end
    evaluated: tuple[float, int] = (0.0, 0)
    scores: Tensor = field(default_factory=lambda: torch.empty(0))


def start(job: StrategyJob, wrap: Callable[[Comms], Comms] = lambda comms: comms) -> Runtime:
    """Return the sharded and initialised runtime, built as in `gangline.train.build`. wrap: wrapper of its Comms."""
    comms = wrap(rank.make_comms(job.mesh, job.run.deterministic))
    section = job.run.job
    recompute = Recompute.full if job.recompute else section.recompute
    finish = make_finish(recompute, False, section.recompute_every, job.plan.seams)
    precision = Plain(job.compute or job.dtype, job.dtype)
    composed = Composed(job.run, job.tree, job.plan)
    runtime = load(job.build)(job.run.parallel, RuntimeJob(composed, job.mesh, comms, precision, finish))
    initialise(runtime.shards(), job.plan, job.run.seed)
    return runtime


def start_rows(job: StrategyJob, precision: Precision) -> Runtime:
    """Return the runtime of the job's model on the toy strategy `rows`, which sums in rank order.

    For tests of parts that are not strategies: `job.build` is ignored.
    """
    comms = rank.make_comms(job.mesh, True)
    finish = make_finish(Recompute.none, False, 1, job.plan.seams)
    composed = Composed(job.run, job.tree, job.plan)
    runtime = RowsRuntime(RuntimeJob(composed, job.mesh, comms, precision, finish))
    initialise(runtime.shards(), job.plan, job.run.seed)
    return runtime


def hold_arrays(runtime: Runtime) -> list[Held]:
    """Return copies of this rank's shards of the model arrays, under names without "model/"."""
    return [(parse_parameter(s.name), s.offset, s.local.detach().clone()) for s in runtime.shards()]


def hold_gradients(runtime: Runtime) -> list[Held]:
    """Return copies of this rank's shards of the gradients."""
    gradients = []
    for parameter in runtime.parameters():
        for piece in parameter.pieces:
            assert piece.tensor.grad is not None, f"a piece of {parameter.name} has no gradient after the step"
            assert piece.tensor.grad.shape == piece.tensor.shape
            gradients.append((parameter.name, piece.shard.offset, piece.tensor.grad.detach().clone()))
    return gradients


def run_step(runtime: Runtime, microbatches: list[Batch]) -> RankStep:
    """Run forward and backward, and measure the gradient norm, without clipping and without a weight update."""
    result = runtime.step(microbatches)
    norm = runtime.clip(None)
    own, gradients = (result.own_loss_sum, result.own_tokens), hold_gradients(runtime)
    return RankStep(result.loss_sum, result.tokens, result.finite, result.metrics, norm, gradients, own)


def apply(runtime: Runtime, velocities: dict[int, Tensor]) -> None:
    """Update this rank's pieces by `reference.descend`, then call `finish_update`."""
    with torch.no_grad():
        for parameter in runtime.parameters():
            for piece in parameter.pieces:
                velocity = velocities.setdefault(id(piece.tensor), torch.zeros_like(piece.tensor, requires_grad=False))
                assert piece.tensor.grad is not None
                descend(piece.tensor, piece.tensor.grad, velocity)
    runtime.finish_update()


def train(job: StrategyJob) -> Trained:
    """Train for `job.steps` steps, then evaluate and score the samples of the next step."""
    runtime = start(job)
    index, width = runtime.data_coordinate
    names = [parameter.name for parameter in runtime.parameters()]
    record = Trained((index, width), runtime.registry, names, first=hold_arrays(runtime))
    velocities: dict[int, Tensor] = {}
    for step in range(job.steps):
        record.steps.append(run_step(runtime, job.share(step, index, width)))
        apply(runtime, velocities)
    record.evaluated = runtime.evaluate(job.share(job.steps, index, width))
    record.scores = runtime.score(job.share_for_score(index, width))
    record.last = hold_arrays(runtime)
    return record


def expect(
    job: StrategyJob, width: int
) -> tuple[dict[str, Tensor], list[Expected], dict[str, Tensor], tuple[float, int], Tensor]:
    """Return the reference's initial arrays, steps, final arrays, evaluation and scores for the job."""
    reference = Reference(job.tree, job.plan, seed=job.run.seed, dtype=job.dtype)
    first = {name: array.clone() for name, array in reference.get_arrays().items()}
    steps = []
    for step in range(job.steps):
        steps.append(reference.step([job.share(step, index, width) for index in range(width)]))
        reference.update()
    evaluated = reference.evaluate([job.share(job.steps, index, width) for index in range(width)])
    scores = reference.score(job.share_for_score(0, 1))
    return first, steps, {name: array.clone() for name, array in reference.get_arrays().items()}, evaluated, scores


def list_shards(job: StrategyJob) -> list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], str, bool]]:
    """Return (name, global shape, offset, local shape, dtype, primary) of every shard."""
    return [
        (s.name, tuple(s.global_shape), tuple(s.offset), tuple(s.local.shape), name_dtype(s.dtype), s.primary)
        for s in start(job).shards()
    ]


def list_pieces(job: StrategyJob) -> list[tuple[str, tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]]:
    """Return (name, shape, [(offset, shape) of each piece]) of every parameter; checks that pieces are leaf tensors."""
    pieces = []
    for parameter in start(job).parameters():
        assert all(piece.tensor.is_leaf for piece in parameter.pieces), (
            f"a piece of {parameter.name} is not a leaf tensor"
        )
        places = [(tuple(piece.shard.offset), tuple(piece.tensor.shape)) for piece in parameter.pieces]
        pieces.append((parameter.name, tuple(parameter.shape), places))
    return pieces


def transform_matrix(matrix: Tensor) -> Tensor:
    """Return W Wᵀ W + |W|, of which every element depends on the full matrix."""
    return matrix @ matrix.T @ matrix + matrix.norm()


def map_matrices(job: StrategyJob) -> tuple[list[Held], list[MatrixId], dict[MatrixId, int]]:
    """Map all matrices, times 2, by `transform_matrix` with the runtime's `map_matrices`.

    Returns (this rank's shards of the results, ids that this rank mapped, owners by `find_matrix_owners`).
    """
    runtime, pieces, mapped = start(job), [], list[MatrixId]()

    def count_matrix(matrix: Tensor, id: MatrixId) -> Tensor:
        mapped.append(id)
        return transform_matrix(matrix)

    parameters = {one.name: one for one in runtime.parameters() if len(one.shape) >= 2}
    inputs = ((one.name, [piece.tensor.detach() * 2 for piece in one.pieces]) for one in parameters.values())
    for name, outputs in runtime.map_matrices(count_matrix, inputs):
        pairs = zip(parameters[name].pieces, outputs, strict=True)
        pieces += [(name, piece.shard.offset, tensor.clone()) for piece, tensor in pairs]
    names = [name for name in runtime.names() if len(runtime.registry[name_model_array(name)].shape) >= 2]
    return pieces, mapped, dict(runtime.find_matrix_owners(names))


def expect_mapped(job: StrategyJob) -> dict[str, Tensor]:
    """Return `transform_matrix(2 * matrix)` of every matrix by name, computed in one process."""
    reference, arrays = Reference(job.tree, job.plan, seed=job.run.seed, dtype=job.dtype), {}
    for name, weight in reference.weights.items():
        if weight.dim() >= 2:
            matrices = weight.detach().reshape(-1, *weight.shape[-2:]) * 2
            arrays[name] = torch.stack([transform_matrix(matrix) for matrix in matrices]).view(weight.shape)
    return arrays


def clip_gradients(job: StrategyJob, max_norm: float) -> Clipped:
    """Run one step, and return the norm by `clip` and the gradients before and after it."""
    runtime = start(job)
    runtime.step(job.share(0, *runtime.data_coordinate))
    before = hold_gradients(runtime)
    norm = runtime.clip(max_norm)
    return norm, before, hold_gradients(runtime)


def clip_changed_gradients(job: StrategyJob, max_norm: float, factor: float) -> list[Clipped | None]:
    """Run two steps, multiply the gradients of each step by `factor`, and return the results of `clip` for each step.

    Only the second step calls `remeasure` before `clip`. In the first step `clip` may raise RuntimeError; the result is
    then None.
    """
    runtime, outcomes = start(job), list[Clipped | None]()
    for announced in (False, True):
        runtime.step(job.share(0, *runtime.data_coordinate))
        with torch.no_grad():
            for parameter in runtime.parameters():
                for piece in parameter.pieces:
                    assert piece.tensor.grad is not None
                    piece.tensor.grad.mul_(factor)
        before = hold_gradients(runtime)
        if announced:
            runtime.remeasure()
        try:
            norm = runtime.clip(max_norm)
        except RuntimeError:
            if announced:
                raise
            outcomes.append(None)
        else:
            outcomes.append((norm, before, hold_gradients(runtime)))
    return outcomes


def score_misfits(job: StrategyJob) -> list[str]:
    """Return the errors of `score` for a batch of two samples, and for a share shorter than those of other ranks."""
    runtime = start(job)
    index, width = runtime.data_coordinate
    one = job.share_for_score(index, width)[0]
    names = ("tokens", "targets", "loss_mask", "position", "sample")
    two: dict[str, Any] = {name: torch.cat((getattr(one, name),) * 2) for name in names}
    shares = [[replace(one, **two)]]
    if width > 1:
        shares.append([one] if index else [])
    answers = []
    for batches in shares:
        try:
            answers.append(repr(runtime.score(batches)))
        except ValueError as error:
            answers.append(f"ValueError: {error}")
    return answers


def write_and_evaluate(job: StrategyJob, factor: float) -> tuple[float, int]:
    """Multiply the memory of every shard by `factor`, as a load overwrites it, then evaluate.

    On replicas that may differ (`Runtime.differs`) and that no checkpoint stores, the factor is doubled.
    """
    runtime = start(job)
    place = job.mesh.coordinate(rank.index)
    if any(place[axis] for axis in runtime.differs):
        factor *= 2
    runtime.step(job.share(0, *runtime.data_coordinate))  # so that values cached from an earlier step are detected
    with torch.no_grad():
        for shard in runtime.shards():
            shard.local.mul_(factor)
    return runtime.evaluate(job.share(0, *runtime.data_coordinate))


def expect_written(job: StrategyJob, factor: float) -> tuple[float, int]:
    """Return the evaluation of the reference after multiplying every array by `factor`."""
    reference = Reference(job.tree, job.plan, seed=job.run.seed, dtype=job.dtype)
    with torch.no_grad():
        for array in reference.get_arrays().values():
            array.mul_(factor)
    return reference.evaluate([job.share(0, 0, 1)])


def step_bad_sample(job: StrategyJob, value: float) -> list[RankStep]:
    """Run two steps in which only sample 0 reads one embedding row: filled with `value`, then with zeros."""
    runtime = start(job)
    index, width = runtime.data_coordinate
    batches = job.share(0, index, width)
    for batch in batches:
        batch.tokens = torch.where((batch.sample == 0)[:, None], job.vocab_size - 1, batch.tokens)
    poisoned = name_model_array(f"{job.plan.embed}.weight")
    steps = []
    for poison in (value, 0.0):
        with torch.no_grad():
            for shard in runtime.shards():
                if shard.name == poisoned and shard.offset[0] <= job.vocab_size - 1 < shard.offset[0] + len(
                    shard.local
                ):
                    shard.local[job.vocab_size - 1 - shard.offset[0]] = poison
        steps.append(run_step(runtime, batches))
    return steps


def step_without_targets(job: StrategyJob) -> RankStep:
    """Run a step with an empty loss mask on every rank."""
    runtime = start(job)
    batches = job.share(0, *runtime.data_coordinate)
    return run_step(runtime, [replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)) for batch in batches])
