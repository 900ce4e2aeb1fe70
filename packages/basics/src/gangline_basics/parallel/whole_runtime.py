"""Runtime with every array unsharded on each rank: the base of `single` and `ddp`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from gangline.batch import Batch
from gangline.comm.base import Comm
from gangline.comm.purpose import mark_traffic
from gangline.comm.solo import Solo
from gangline.mesh import DATA_AXES
from gangline.model import forward_context
from gangline.model.buffers import iterate_listeners
from gangline.model.forward_context import Collected
from gangline.runtime import Job, MatrixId, ParamShard, Runtime, Sampling, ShardedParam, StepResult, Stop, Written
from gangline.shard import Layout, Registry, Shard, name_model_array, parse_parameter
from gangline_basics.parallel import norm
from gangline_basics.parallel.matrices import Matrices
from gangline_basics.parallel.metrics import Tally
from gangline_basics.parallel.microbatch import WholeModel, count_on_host, count_tokens, make_frame
from gangline_basics.parallel.prepare import bind_folds, finish_blocks, set_matmuls
from gangline_basics.parallel.sample_losses import check_share, gather_in_order, sum_evaluated
from gangline_basics.parallel.storage import WholeStorage
from gangline_basics.sampling.on_ranks import keeps, prepare_model, share_writing


class WholeRuntime(Runtime):
    """Runtime of the complete model on this rank's share of the batch; subclasses sum gradients over ranks.

    In a step, the valid tokens of all ranks are counted during the first forward pass. Each microbatch's backward pass
    starts from (loss scale / global tokens), so gradients are summed and never averaged. Sums of loss and metrics are
    reduced over the ranks during the last backward pass.
    """

    def __init__(self, job: Job, groups: int = 1) -> None:
        run, plan, model, mesh, comms, precision = job.run, job.plan, job.model, job.mesh, job.comms, job.precision
        self.precision, self.seed, self.deterministic = precision, run.seed, run.deterministic
        self._tree = job.composed.tree
        self.comm: Comm = comms.get_comm(*DATA_AXES)
        self.device, self.rank, self.groups = comms.device, comms.rank, groups
        self.storage = WholeStorage(model, plan, precision, comms.device)
        set_matmuls(model, plan, precision)
        bind_folds(model, plan, lambda fold: Solo(fold, comms.rank))
        finish_blocks(model, plan, job.finish)
        self.model, self.stages = model, WholeModel(model, plan)
        layouts = {name_model_array(name): Layout(*described) for name, described in self.storage.get_shapes().items()}
        self.registry = Registry.of(mesh, layouts, self.differs)
        self.data_coordinate = (mesh.index(mesh.coordinate(comms.rank), DATA_AXES), mesh.size(*DATA_AXES))
        self._masters = [self.storage.masters[name] for name in self.storage.trained]
        self._norm = norm.MeasuredNorm(
            list(zip(self.storage.trained, self._masters, strict=True)), self._measure_norm, is_local=True
        )
        self._tally = Tally(self.comm, comms.device, groups)
        self._told = [(plan.get_emit_path(path), module) for path, module in iterate_listeners(model, "", plan)]
        self._emitted: dict[str, dict[str, Tensor]] = {}

    @abstractmethod
    def _begin_backward(self, microbatch: int, last: int) -> None:
        """Prepare the backward pass of microbatch number `microbatch` of 0 to `last`."""

    @abstractmethod
    def _reduce(self) -> list[Tensor]:
        """Return the global gradients after all backward passes, still loss-scaled, also in the masters' `.grad`."""

    def step(self, microbatches: Sequence[Batch]) -> StepResult:
        """Run a step (`Runtime.step`). Raises ValueError if microbatches do not divide into `parallel.groups`."""
        if len(microbatches) % self.groups:
            raise ValueError(f"{len(microbatches)} microbatches are not divisible by parallel.groups={self.groups}")
        self._norm.discard()
        self.storage.refresh()
        self.storage.clear_gradients()
        own = count_on_host(microbatches)
        with mark_traffic("tokens"):
            own_tokens, pending_tokens = int(own), self.comm.start_all_reduce(own)
        emissions, losses, tokens = Collected(), [], None
        last = len(microbatches) - 1
        for index, batch in enumerate(microbatches):
            with forward_context.frame(make_frame(batch, index, self.seed, emissions)) as frame:
                loss = self.stages.compute_loss(batch)
                losses.append(loss.detach())
                if tokens is None:
                    tokens = int(pending_tokens.wait())
                if index == last:
                    self._tally.begin(losses, emissions)
                frame.coefficient = self.precision.scale / max(tokens, 1)
                self._begin_backward(index, last)
                with forward_context.backward():
                    loss.backward(torch.full_like(loss, frame.coefficient))
        if tokens is None:  # this rank has no microbatches, but other ranks have some
            tokens = int(pending_tokens.wait())
            self._tally.begin(losses, emissions)
        gradients = self._reduce()
        if self.precision.scale != 1.0:
            torch._foreach_mul_(gradients, 1.0 / self.precision.scale)
        tallied, (self._norm.value,) = self._tally.finish(tokens, self._norm.measure())
        self._emitted = tallied.by_path
        finite = math.isfinite(tallied.loss_sum) and math.isfinite(self._norm.value)
        return StepResult(tallied.loss_sum, tokens, finite, tallied.metrics, tallied.own_loss_sum, own_tokens)

    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[float, int]:
        losses, tokens = self._compute_losses(microbatches), count_tokens(microbatches, self.device)[0]
        return sum_evaluated(losses, len(microbatches), tokens, self.data_coordinate, self.comm, self.device)

    def score(self, batches: Sequence[Batch], losses_per_sample: int = 1) -> Tensor:
        check_share(batches, self.comm, self.device)
        losses = self._compute_losses(batches)
        return gather_in_order(losses, len(batches), self.data_coordinate, self.comm, self.device, losses_per_sample)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, stop: Stop | None = None
    ) -> list[Written]:
        self.storage.refresh()
        cached, forward = keeps(self._tree), self.stages.compute_last_logits
        with prepare_model(self.model):
            return share_writing(
                forward, prompts, sampling, cached=cached, comm=self.comm, device=self.device, stop=stop
            )

    @torch.no_grad()
    def _compute_losses(self, microbatches: Sequence[Batch]) -> list[Tensor]:
        """Compute the loss of each microbatch, 0-d, in evaluation mode."""
        self.storage.refresh()
        self.model.eval()
        losses = []
        for index, batch in enumerate(microbatches):
            with forward_context.frame(make_frame(batch, index, self.seed, None)):
                losses.append(self.stages.compute_loss(batch))
        self.model.train()
        return losses

    def clip(self, max_norm: float | None) -> float:
        return self._norm.clip(max_norm)

    def remeasure(self) -> None:
        self._norm.discard()

    def _measure_norm(self) -> Tensor:
        return norm.compute_global_norm(
            [master.grad for master in self._masters if master.grad is not None], self.deterministic
        )

    def parameters(self) -> list[ShardedParam]:
        shards = {parse_parameter(shard.name): shard for shard in self.shards()}
        return [
            ShardedParam(name, tuple(master.shape), (ParamShard(master, shards[name]),))
            for name, master in zip(self.storage.trained, self._masters, strict=True)
        ]

    @cached_property
    def _matrices(self) -> Matrices:
        return Matrices(self.registry, self.comm, self.parameters(), self.device)

    def map_matrices(
        self, function: Callable[[Tensor, MatrixId], Tensor], inputs: Iterable[tuple[str, Sequence[Tensor]]]
    ) -> Iterator[tuple[str, Sequence[Tensor]]]:
        return self._matrices.map(function, inputs)

    def find_matrix_owners(self, names: Sequence[str]) -> dict[MatrixId, int]:
        return self._matrices.find_owners(names)

    def shards(self) -> Iterator[Shard]:
        for name, array in self.storage.get_arrays().items():
            ((box, primary),) = self.registry.list_rank_boxes(name_model_array(name), self.rank)
            yield Shard(name_model_array(name), tuple(array.shape), array.dtype, box.offset, array, primary)

    @torch.no_grad()
    def finish_update(self) -> None:
        for block, module in self._told:
            module.after_step(self._emitted.get(block, {}))
