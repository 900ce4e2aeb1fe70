"""The runtime: a model cut along every axis of the mesh, able to run one step.

tp, sequence parallel   inside the modules        tensor/
cp                      the batch and attention   context/
pp                      the order of a step       pipeline/
dp, ZeRO                where weights lie         data_parallel/
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from gangline import inside
from gangline.batch import Batch
from gangline.inside import Collected, Frame
from gangline.mesh import AXES, DATA_AXES
from gangline.parallel import norm as scaling
from gangline.parallel.matrices import Matrices
from gangline.parallel.metrics import Tally
from gangline.parallel.microbatch import count_on_host, count_tokens, frame_of
from gangline.parallel.score import check_share, evaluated, in_global_order
from gangline.runtime import Runtime, ShardedParam, StepResult
from gangline.shard import Registry, Shard
from gangline_parallel_megatron_style.components import Components
from gangline_parallel_megatron_style.data_parallel import norm
from gangline_parallel_megatron_style.pipeline import record
from gangline_parallel_megatron_style.pipeline.rank_stages import RankStages
from gangline_parallel_megatron_style.pipeline.stage import Segment, Stage
from gangline_parallel_megatron_style.pipeline.weight_gradients import is_open


class ComposedRuntime(Runtime, RankStages):
    """Runs the chunks of this rank in the order of the pipeline's schedule."""

    def __init__(self, made: Components) -> None:
        RankStages.__init__(self)
        self.made, self.storage, self.mesh = made, made.storage, made.mesh
        comms = made.comms
        self.registry, self.rank, self.device = made.storage.registry, comms.rank, comms.device
        coordinate = self.mesh.coordinate(self.rank)
        self.data_coordinate = (self.mesh.index(coordinate, DATA_AXES), self.mesh.size(*DATA_AXES))
        self.world = comms.world
        self._readers = comms.axis(*DATA_AXES)  # the ranks whose batches differ
        self._speaks = made.sequence_parallel or coordinate["tp"] == 0  # else this rank's tokens are counted elsewhere
        self._counts_loss = coordinate["tp"] == 0
        self._tally = Tally(self.world, self.device)
        self._named = self.storage.parameters()
        self._leaves = [piece.tensor for named in self._named for piece in named.pieces]
        layouts = [self.registry[f"model/{name}"] for name in made.shapes]
        self._whole = not any(layout.divisions or layout.at for layout in layouts)  # every rank has all gradients
        self._emitted: dict[str, dict[str, Tensor]] = {}
        self.chunks = [Stage(segments, self._before, self._after) for segments in made.chunks]
        self._executor = made.executor(self)
        self._neighbours = {segment: segments for segments in made.chunks for segment in segments}

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, microbatches: Sequence[Batch]) -> StepResult:
        self.storage.refresh()
        self.storage.clear()
        if microbatches:
            self.storage.switch.on = microbatches[0].step >= self.made.compress_after
        losses = self.run_microbatches(microbatches)
        tokens = self._count()
        if not losses or not self._counts_loss:
            losses = [torch.zeros((), dtype=torch.float64, device=self.device) for _ in microbatches]
        self._tally.begin(losses, self._collected if self._speaks else Collected())
        self.storage.finish()
        gradients = [leaf.grad for leaf in self._leaves if leaf.grad is not None]
        if self.made.precision.scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, 1.0 / self.made.precision.scale)
        self._norm = self._global_norm()
        tallied, (self._norm_value,) = self._tally.finish(tokens, self._norm)
        self._emitted = tallied.by_path
        finite = math.isfinite(tallied.loss_sum) and math.isfinite(self._norm_value)
        if self.made.records and microbatches:
            tallied.metrics.update(self._recorded(len(microbatches)))
        return StepResult(tallied.loss_sum, tokens, finite, tallied.metrics)

    def run_microbatches(self, microbatches: Sequence[Batch], tokens: int | None = None) -> list[Tensor]:
        """Forward and backward of all microbatches; their losses on the rank that has the head.

        tokens: how many count in the whole step, where that is known (on the meta device nothing can be counted).
        """
        self._begin(microbatches, Collected())
        self._tokens = tokens
        if tokens is None:
            mine = count_on_host(microbatches)  # before cp cuts them
            self._counted = self._readers.start_all_reduce(mine)
        return self._executor.step(len(microbatches)) if microbatches else []

    def _recorded(self, microbatches: int) -> dict[str, float | list[float]]:
        coordinate = self.mesh.coordinate(self.rank)
        first = all(index == 0 for axis, index in coordinate.items() if axis != "pp")
        schedule = self._executor.schedule(microbatches)
        return record.told(self._executor.spans, schedule, coordinate["pp"], first, self.world, self.device)

    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[float, int]:
        losses = self._losses(microbatches)
        counts = self._counts_loss and self.mesh.coordinate(self.rank)["pp"] == 0
        tokens = count_tokens(self._batches if counts else (), self.device)[0]
        self._begin((), None)
        return evaluated(losses, len(microbatches), tokens, self.data_coordinate, self.world, self.device)

    def score(self, batches: Sequence[Batch]) -> Tensor:
        check_share(batches, self.world, self.device)
        losses = self._losses(batches)
        self._begin((), None)
        return in_global_order(losses, len(batches), self.data_coordinate, self.world, self.device)

    @torch.no_grad()
    def _losses(self, microbatches: Sequence[Batch]) -> list[Tensor]:
        """In evaluation, of each microbatch the loss of this rank's tokens; none where another rank counts them."""
        self.storage.refresh()
        self.made.model.eval()
        self._begin(microbatches, None)
        try:
            losses = self._executor.evaluate(len(microbatches)) if microbatches else []
        finally:
            self.made.model.train()
        return losses if self._counts_loss else []

    def _begin(self, microbatches: Sequence[Batch], collected: Collected | None) -> None:
        self._collected = collected or Collected()
        self._batches = [self.made.own_part(batch) for batch in microbatches]
        self._frames = [self._frame(batch, number, collected) for number, batch in enumerate(self._batches)]

    def _frame(self, batch: Batch, number: int, collected: Collected | None) -> Frame:
        frame = frame_of(batch, number, self.made.seed, collected)
        frame.over_sequence = self.made.over_sequence
        whole = frame.sample, frame.document, frame.position
        for name in ("sample", "document", "position"):
            of_tokens = getattr(frame, name)
            if of_tokens is not None:
                setattr(frame, name, self.made.own_tokens(of_tokens))
        frame.inner = whole
        return frame

    def _count(self) -> int:
        """Valid tokens of the whole step."""
        if self._tokens is None:
            self._tokens = int(self._counted.wait())
        return self._tokens

    # --- what the executor calls ------------------------------------------------------------------------------------

    def forward(self, chunk: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        with inside.frame(self._frames[microbatch]):
            return self.chunks[chunk].forward(microbatch, hidden, self._batches[microbatch])

    def backward(self, chunk: int, microbatch: int, output: Tensor, grad: Tensor | None) -> None:
        frame = self._frames[microbatch]
        frame.coefficient = self.made.precision.scale / max(self._count(), 1)
        self._micro = microbatch
        if output.requires_grad:  # of a first stage that is not trained nothing does
            with inside.frame(frame):
                torch.autograd.backward(output, torch.full_like(output, frame.coefficient) if grad is None else grad)
        self.chunks[chunk].backward_ends(microbatch)

    def weights(self, chunk: int, microbatch: int) -> None:
        """What `backward` put off; then the chunk's gradients are complete."""
        self._micro = microbatch
        super().weights(chunk, microbatch)
        for segment in self.made.chunks[chunk]:
            self._reduce(segment)

    def empty(self, microbatch: int) -> Tensor:
        B, T = self._batches[microbatch].shape
        t = T // self.made.tokens_cut
        return torch.empty(B, t, self.made.width, dtype=self.made.precision.compute_dtype, device=self.device)

    # --- around each module -----------------------------------------------------------------------------------------

    def _before(self, segment: Segment, backward: bool) -> None:
        if backward and segment.kind == "embed":
            return  # a lookup needs no weights on its way back
        for group in segment.groups:
            for flat in self.storage.groups[group]:
                flat.wait()
        self._prefetch(segment, -1 if backward else 1)

    def _prefetch(self, segment: Segment, step: int) -> None:
        segments = self._neighbours[segment]
        at = segments.index(segment)
        for ahead in range(1, self.made.prefetch + 1):
            other = at + step * ahead
            if 0 <= other < len(segments) and (step > 0 or segments[other].kind != "embed"):
                for group in segments[other].groups:
                    for flat in self.storage.groups[group]:
                        flat.gather()

    def _comes_next(self, segment: Segment) -> bool:
        """Whether the backward pass, which begins with the head, wants this segment or gathers it ahead at once."""
        segments = self._neighbours[segment]
        last = len(segments) - 1
        return segments[last].kind == "head" and segments.index(segment) >= last - self.made.prefetch

    def _after(self, segment: Segment, backward: bool) -> None:
        if backward and not is_open():
            self._reduce(segment)
        if backward or not (torch.is_grad_enabled() and self._comes_next(segment)):
            for group in segment.groups:
                for flat in self.storage.groups[group]:
                    flat.release()

    def _reduce(self, segment: Segment) -> None:
        self.storage.reduce(segment.reduces, last=self._micro == len(self._batches) - 1)

    # --- after the step ---------------------------------------------------------------------------------------------

    def _global_norm(self) -> Tensor:
        if self.made.deterministic:
            return norm.norm_by_rows(self._named, self.made.shapes, self.world, self.device)
        return norm.global_norm(self._named, None if self._whole else self.world, self.device)

    def clip(self, max_norm: float | None) -> float:
        if max_norm is not None and self._leaves:
            scaling.clip(self._leaves, max_norm, self._norm, self._norm_value)
        return self._norm_value

    @torch.no_grad()
    def applied(self) -> None:
        for block, module in self.made.told:
            module.after_step(self._emitted.get(block, {}))  # type: ignore[operator]

    def parameters(self) -> list[ShardedParam]:
        return self._named

    def names(self) -> list[str]:
        return list(self.made.shapes)

    @cached_property
    def _matrices(self) -> Matrices:
        stage = self.made.comms.axis(*(axis for axis in AXES if axis != "pp"))
        return Matrices(self.registry, stage, self._named, self.device)

    def map_matrices(
        self, function: Callable[[Tensor], Tensor], given: Iterable[tuple[str, Sequence[Tensor]]]
    ) -> Iterator[tuple[str, Sequence[Tensor]]]:
        return self._matrices.map(function, given)

    def local(self) -> tuple[Registry, list[Shard]]:
        return self.storage.local()

    def shards(self) -> Iterator[Shard]:
        yield from self.storage.arrays_here()
