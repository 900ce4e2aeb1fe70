"""Runtime of a model that is sharded along every axis of the mesh; it runs one step at a time.

axis                    changes                        package
tp, sequence parallel   matmuls inside the modules     tensor/
cp                      the batch and attention        context/
pp                      the order of a step's passes   pipeline/
dp, ZeRO                storage of the weights         data_parallel/
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from gangline.batch import Batch
from gangline.mesh import AXES, DATA_AXES
from gangline.model import forward_context
from gangline.model.forward_context import Collected
from gangline.runtime import MatrixId, Runtime, Sampling, ShardedParam, StepResult, Stop, Written
from gangline.shard import Registry, Shard
from gangline_basics.parallel.matrices import Matrices
from gangline_basics.parallel.metrics import Tally
from gangline_basics.parallel.microbatch import count_tokens, make_frame
from gangline_basics.parallel.sample_losses import check_share, gather_in_order, sum_evaluated
from gangline_basics.sampling.decode import decode
from gangline_basics.sampling.on_ranks import prepare_model
from gangline_parallel_megatron_style.components import Components
from gangline_parallel_megatron_style.data_parallel.group_schedule import GroupSchedule
from gangline_parallel_megatron_style.data_parallel.norm import GradNorm
from gangline_parallel_megatron_style.pipeline import record
from gangline_parallel_megatron_style.pipeline.rank_stages import RankStages
from gangline_parallel_megatron_style.pipeline.stage import Stage
from gangline_parallel_megatron_style.step_context import StepContext, make_local_frame
from gangline_parallel_megatron_style.write import broadcast_logits, gather_sequences


class ComposedRuntime(Runtime, RankStages):
    """Runtime that runs the stages of this rank in the order of the pipeline's schedule."""

    def __init__(self, made: Components) -> None:
        RankStages.__init__(self)
        self.made, self.storage, self.mesh = made, made.storage, made.mesh
        comms = made.comms
        self.registry, self.rank, self.device = made.storage.registry, comms.rank, comms.device
        self.world = comms.world
        coordinate = self.mesh.coordinate(self.rank)
        self.data_coordinate = (self.mesh.index(coordinate, DATA_AXES), self.mesh.size(*DATA_AXES))
        self._counts_loss = coordinate["tp"] == 0
        self._counts_metrics = made.sequence_parallel or self._counts_loss  # without it, only tp index 0 counts
        self._tally = Tally(self.world, self.device)
        self._emitted: dict[str, dict[str, Tensor]] = {}
        self._parameters = self.storage.parameters()
        self._grad_norm = GradNorm(
            self._parameters, self.registry, made.shapes, self.world, self.device, made.deterministic
        )
        self._norm, self._tokens_cut = self._grad_norm.measured, made.tokens_cut
        self._groups = GroupSchedule(made.storage, made.stages, made.prefetch)
        self.stages = [
            Stage(segments, self._groups.begin_segment, self._groups.end_segment) for segments in made.stages
        ]
        self._executor = made.executor(self)
        self._context = self._begin((), None)

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, microbatches: Sequence[Batch]) -> StepResult:
        self._norm.discard()
        self.storage.refresh()
        self.storage.clear()
        if microbatches:
            self.storage.clock.step = microbatches[0].step
        losses = self.run_microbatches(microbatches)
        tokens, own = self._context.tokens, self._context.batches
        if not losses or not self._counts_loss:
            own = []
            losses = [torch.zeros((), dtype=torch.float64, device=self.device) for _ in microbatches]
        self._tally.begin(losses, self._context.collected if self._counts_metrics else Collected())
        self.storage.finish()
        self._grad_norm.unscale(self.made.precision.scale)
        norm, own_tokens = self._norm.measure(), count_tokens(own, self.device)
        tallied, (self._norm.value, own_count) = self._tally.finish(tokens, norm, own_tokens)
        self._emitted = tallied.by_path
        finite = math.isfinite(tallied.loss_sum) and math.isfinite(self._norm.value)
        if self.made.records and microbatches:
            tallied.metrics.update(self._read_record(len(microbatches)))
        return StepResult(tallied.loss_sum, tokens, finite, tallied.metrics, tallied.own_loss_sum, int(own_count))

    def run_microbatches(self, microbatches: Sequence[Batch], tokens: int | None = None) -> list[Tensor]:
        """Run forward and backward of all microbatches; return their losses, on the rank that has the head.

        tokens: number of tokens of all ranks that contribute to the loss of the step; None: count them (needs values,
        which tensors on the meta device lack)
        """
        self._context = self._begin(microbatches, Collected())
        if tokens is None:
            self._context.count(microbatches, self.made.comms.get_comm(*DATA_AXES))  # before cp splits them
        else:
            self._context.tokens = tokens
        return self._executor.step(len(microbatches)) if microbatches else []

    def _read_record(self, microbatches: int) -> dict[str, float | list[float]]:
        coordinate = self.mesh.coordinate(self.rank)
        first = all(index == 0 for axis, index in coordinate.items() if axis != "pp")
        schedule = self._executor.get_schedule(microbatches)
        return record.as_metrics(self._executor.spans, schedule, coordinate["pp"], first, self.world, self.device)

    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[float, int]:
        losses = self._compute_losses(microbatches)
        counts = self._counts_loss and self.mesh.coordinate(self.rank)["pp"] == 0
        tokens = count_tokens(self._context.batches if counts else (), self.device)[0]
        self._context = self._begin((), None)
        return sum_evaluated(losses, len(microbatches), tokens, self.data_coordinate, self.world, self.device)

    def score(self, batches: Sequence[Batch], losses_per_sample: int = 1) -> Tensor:
        check_share(batches, self.world, self.device)
        losses = self._compute_losses(batches)
        self._context = self._begin((), None)
        return gather_in_order(losses, len(batches), self.data_coordinate, self.world, self.device, losses_per_sample)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, stop: Stop | None = None
    ) -> list[Written]:
        self.storage.refresh()
        with prepare_model(self.made.model), gather_sequences(self.made, self.stages):
            self._tokens_cut = 1
            try:
                return decode(
                    self._compute_next_logits, prompts, sampling, cached=self.made.cached, device=self.device, stop=stop
                )
            finally:
                self._tokens_cut = self.made.tokens_cut
                self._context = self._begin((), None)

    def _compute_next_logits(self, batch: Batch) -> Tensor:
        """Return, on every rank, the logits (B, V) of the token that follows the last token of each row."""
        self._context = StepContext([batch], [make_frame(batch, 0, self.made.seed, None)], None)
        return broadcast_logits(self.made, self._executor.evaluate(1))

    @torch.no_grad()
    def _compute_losses(self, microbatches: Sequence[Batch]) -> list[Tensor]:
        """Return the evaluation loss of this rank's tokens for each microbatch; [] without the head or tp index 0."""
        self.storage.refresh()
        self.made.model.eval()
        self._context = self._begin(microbatches, None)
        try:
            losses = self._executor.evaluate(len(microbatches)) if microbatches else []
        finally:
            self.made.model.train()
        return losses if self._counts_loss else []

    def _begin(self, microbatches: Sequence[Batch], collected: Collected | None) -> StepContext:
        components, batches = self.made, [self.made.own_part(batch) for batch in microbatches]
        frames = [
            make_local_frame(
                batch,
                number,
                components.seed,
                collected,
                components.own_tokens,
                components.over_sequence,
                components.for_all_heads,
            )
            for number, batch in enumerate(batches)
        ]
        return StepContext(batches, frames, collected)

    # --- called by the executor ---------------------------------------------------------------------------------------

    def forward(self, chunk: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        with forward_context.frame(self._context.frames[microbatch]):
            return self.stages[chunk].forward(microbatch, hidden, self._context.batches[microbatch])

    def backward(self, chunk: int, microbatch: int, output: Tensor, grad: Tensor | None) -> None:
        frame = self._context.frames[microbatch]
        frame.coefficient = self.made.precision.scale / max(self._context.tokens, 1)
        self._groups.last = microbatch == len(self._context.batches) - 1
        if output.requires_grad:  # the output of a frozen first stage has no gradient
            with forward_context.frame(frame), forward_context.backward():
                torch.autograd.backward(output, torch.full_like(output, frame.coefficient) if grad is None else grad)
        self.stages[chunk].end_backward(microbatch)

    def compute_weight_grads(self, chunk: int, microbatch: int) -> None:
        """Compute a stage's deferred weight gradients and start to reduce the gradients, which are then complete."""
        self._groups.last = microbatch == len(self._context.batches) - 1
        super().compute_weight_grads(chunk, microbatch)
        for segment in self.made.stages[chunk]:
            self._groups.reduce(segment)

    def allocate_hidden(self, microbatch: int) -> Tensor:
        B, T = self._context.batches[microbatch].shape
        t = T // self._tokens_cut
        assert self.made.width is not None
        return torch.empty(B, t, self.made.width, dtype=self.made.precision.compute_dtype, device=self.device)

    # --- after the step ---------------------------------------------------------------------------------------------

    def clip(self, max_norm: float | None) -> float:
        return self._norm.clip(max_norm)

    def remeasure(self) -> None:
        self._norm.discard()

    @torch.no_grad()
    def finish_update(self) -> None:
        for block, module in self.made.listeners:
            module.after_step(self._emitted.get(block, {}))

    def parameters(self) -> list[ShardedParam]:
        return self._parameters

    def names(self) -> list[str]:
        return list(self.made.shapes)

    @cached_property
    def _matrices(self) -> Matrices:
        stage = self.made.comms.get_comm(*(axis for axis in AXES if axis != "pp"))
        return Matrices(self.registry, stage, self._parameters, self.device)

    def map_matrices(
        self, function: Callable[[Tensor, MatrixId], Tensor], inputs: Iterable[tuple[str, Sequence[Tensor]]]
    ) -> Iterator[tuple[str, Sequence[Tensor]]]:
        return self._matrices.map(function, inputs)

    def find_matrix_owners(self, names: Sequence[str]) -> dict[MatrixId, int]:
        return self._matrices.find_owners(names)

    def local(self) -> tuple[Registry, list[Shard]]:
        return self.storage.local()

    def shards(self) -> Iterator[Shard]:
        yield from self.storage.iterate_model_shards()
