"""Toy strategy: every matrix sharded by rows over `dp_shard` (ZeRO stage 3; Rajbhandari et al., SC 2020).

The module `axes` implements the axes tp, cp and pp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from gangline.batch import Batch
from gangline.comm.purpose import mark_traffic
from gangline.mesh import DATA_AXES
from gangline.model import forward_context
from gangline.model.buffers import iterate_listeners
from gangline.model.forward_context import Collected, Frame
from gangline.runtime import Job, MatrixId, ParamShard, Runtime, ShardedParam, StepResult
from gangline.shard import Layout, Registry, Shard, name_dtype, name_model_array
from gangline_basics.parallel import norm
from gangline_basics.parallel.matrices import Matrices
from gangline_basics.parallel.metrics import Tally
from gangline_basics.parallel.microbatch import count_tokens, make_frame
from gangline_basics.parallel.prepare import bind_folds, finish_blocks, set_matmuls
from gangline_basics.parallel.sample_losses import check_share, gather_in_order, sum_evaluated
from gangline_basics.parallel.storage import choose_kept_dtype
from gangline_testkit.toys.axes import Axes
from gangline_testkit.toys.plugin import Rows
from gangline_testkit.toys.rows_storage import RowsOf, build_layout


class RowsRuntime(Runtime):
    """Runtime that gathers all weights before a step, and reduce-scatters gradients by rows after the step."""

    def __init__(self, job: Job) -> None:
        run, plan, model, mesh, comms, precision = job.run, job.plan, job.model, job.mesh, job.comms, job.precision
        self.model, self.plan, self.precision, self.seed = model, plan, precision, run.seed
        self.rank, self.device, self.comm = comms.rank, comms.device, comms.get_comm(*DATA_AXES)
        self.data_coordinate = (self.comm.index, self.comm.size)
        self.deterministic = run.deterministic
        folds = {fold.name: fold for fold in plan.folds if mesh.size(*fold.out_of) > 1 and fold.size > 1}
        shapes = self._describe(model)
        self.axes = Axes(model, plan, comms, self.used)
        rules = {
            name: next((rule for axis, rule in plan.get_shard_rules(name, len(shape)).items() if axis in folds), None)
            for name, (shape, _) in shapes.items()
        }
        on_fold = {name: (rule.dim, folds[rule.axis].size) for name, rule in rules.items() if rule is not None}
        self.registry = Registry.of(
            mesh,
            {
                name_model_array(name): build_layout(shape, dtype, mesh, on_fold.get(name))
                if name not in self.buffers
                else Layout(shape, dtype)
                for name, (shape, dtype) in shapes.items()
            },
        )
        self.parts: dict[str, RowsOf] = {}
        for name in self.used:
            comm = comms.fold_rest(folds[rules[name].axis]) if name in on_fold else self.comm  # type: ignore[union-attr]
            self.parts[name] = RowsOf(
                name, self.registry, self.rank, comm, choose_kept_dtype(plan, name, precision), name not in self.frozen
            )
        self.trained = {name: part for name, part in self.parts.items() if part.trained}
        self._materialise(model)
        set_matmuls(model, plan, precision)
        bind_folds(model, plan, lambda name: comms.fold(next(fold for fold in plan.folds if fold.name == name)))
        self.axes.install()
        finish_blocks(model, plan, job.finish)
        self.tally = Tally(comms.world, self.device)
        leaves = [(name, tensor) for name, part in self.trained.items() for tensor in part.tensors]
        self.norm = norm.MeasuredNorm(leaves, self._compute_global_norm, is_local=False)
        self.emitted: dict[str, dict[str, Tensor]] = {}

    # --- storage -----------------------------------------------------------------------------------------------------

    def _describe(self, model: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return {name: (shape, dtype)} of every array. Set `used` (all names per parameter), `frozen`, `buffers`."""
        self.used: dict[str, list[str]] = {}  # name of a parameter -> all its names in the model
        parameters = dict(model.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        for alias, parameter in parameters.items():
            owner = self.plan.get_owner(alias)
            name = first.setdefault(id(parameters.get(owner, parameter)), owner)
            self.used.setdefault(name, []).append(alias)
        self.frozen = {name for name, aliases in self.used.items() if not parameters[aliases[0]].requires_grad}
        keys = model.state_dict().keys()
        self.buffers = {name: torch.empty_like(b, device="cpu") for name, b in model.named_buffers() if name in keys}
        dtypes = {name: name_dtype(choose_kept_dtype(self.plan, name, self.precision)) for name in self.used}
        shapes = {name: (tuple(parameters[aliases[0]].shape), dtypes[name]) for name, aliases in self.used.items()}
        return shapes | {n: (tuple(b.shape), name_dtype(b.dtype)) for n, b in self.buffers.items()}

    def _materialise(self, model: nn.Module) -> None:
        self.weights: dict[str, nn.Parameter] = {}
        for name, aliases in self.used.items():
            full = self.plan.computes_as_stored(name)
            dtype = choose_kept_dtype(self.plan, name, self.precision) if full else self.precision.compute_dtype
            part = self.parts[name]
            own = self.axes.take_part(name, torch.empty(part.place.shape, dtype=dtype))
            weight = nn.Parameter(own.clone(), requires_grad=part.trained)
            if part.trained:
                weight.grad_dtype = self.precision.grad_dtype
            self.weights[name] = weight
            for alias in aliases:
                path, _, attribute = alias.rpartition(".")
                setattr(model.get_submodule(path), attribute, weight)
        for name, buffer in self.buffers.items():
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, buffer)

    @mark_traffic("weights")
    @torch.no_grad()
    def _refresh(self) -> None:
        for name, part in self.parts.items():
            self.weights[name].copy_(self.axes.take_part(name, part.gather_rows(part.tensors)))
            self.weights[name].grad = None

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self, microbatches: Sequence[Batch]) -> StepResult:
        self.norm.discard()
        self._refresh()
        with mark_traffic("tokens"):
            tokens = int(self.comm.all_reduce(count_tokens(microbatches, self.device)))
        coefficient = self.precision.scale / max(self._compute_divisor(tokens, microbatches), 1)
        emissions, losses = Collected(), []
        for index, batch in enumerate(microbatches):
            with forward_context.frame(self._make_frame(batch, index, emissions)) as frame:
                frame.coefficient = coefficient
                losses.append(self.axes.compute_loss(self.axes.split_tokens(batch)).detach())
                with forward_context.backward():
                    self.axes.backward(coefficient)
        speaks = self.axes.speaks
        self.tally.begin([loss * speaks for loss in losses], emissions if speaks else Collected())
        self._reduce()
        tallied, (value,) = self.tally.finish(tokens, self.norm.measure())
        self.norm.value, self.emitted = value, tallied.by_path
        finite = math.isfinite(tallied.loss_sum) and math.isfinite(value)
        own_tokens = int(count_tokens([self.axes.split_tokens(batch) for batch in microbatches], self.device)) * speaks
        return StepResult(tallied.loss_sum, tokens, finite, tallied.metrics, tallied.own_loss_sum, int(own_tokens))

    def _make_frame(self, batch: Batch, index: int, collected: Collected | None) -> Frame:
        frame = make_frame(self.axes.split_tokens(batch), index, self.seed, collected)
        frame.over_sequence = self.axes.reduce_over_sequence
        return frame

    def _compute_divisor(self, tokens: int, microbatches: Sequence[Batch]) -> int:
        """Return the divisor of the loss: the tokens of all ranks."""
        return tokens

    @mark_traffic("gradients")
    @torch.no_grad()
    def _reduce(self) -> None:
        for name, part in self.trained.items():
            weight = self.weights[name]
            gradient = weight.grad
            if gradient is None:
                gradient = torch.zeros_like(weight, dtype=self.precision.grad_dtype)
            gradient = self.axes.reduce_gradient(name, gradient.to(self.precision.reduce_dtype), part.place.shape)
            pieces = part.reduce_rows(gradient)
            for tensor, piece in zip(part.tensors, pieces, strict=True):
                tensor.grad = piece.to(self.precision.grad_dtype) / self.precision.scale

    @mark_traffic("norm")
    def _compute_global_norm(self) -> Tensor:
        """Return the gradient norm, summed over rows in name order, which is bit-identical in any layout."""
        every = []
        for part in self.trained.values():
            squares = torch.zeros(math.prod(part.shape[:-1]), dtype=torch.float64)
            numbers = torch.arange(len(squares)).view(part.shape[:-1])
            for tensor, box, primary in zip(part.tensors, part.boxes, part.primary, strict=True):
                if primary:
                    squares[numbers[box.slices[:-1]].reshape(-1)] = norm.sum_row_squares(tensor.grad)  # type: ignore[arg-type]
            every.append(squares)
        flat = self.axes.world.all_reduce(torch.cat(every))
        return norm.compute_norm(flat.split([len(squares) for squares in every]))

    def clip(self, max_norm: float | None) -> float:
        return self.norm.clip(max_norm)

    def remeasure(self) -> None:
        self.norm.discard()

    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[float, int]:
        losses = self._compute_losses(microbatches)
        tokens = count_tokens(microbatches if self.axes.first else (), self.device)[0]
        return sum_evaluated(losses, len(microbatches), tokens, self.data_coordinate, self.axes.world, self.device)

    def score(self, batches: Sequence[Batch], losses_per_sample: int = 1) -> Tensor:
        check_share(batches, self.axes.world, self.device)
        losses = self._compute_losses(batches)
        return gather_in_order(
            losses, len(batches), self.data_coordinate, self.axes.world, self.device, losses_per_sample
        )

    @torch.no_grad()
    def _compute_losses(self, microbatches: Sequence[Batch]) -> list[Tensor]:
        self._refresh()
        self.model.eval()
        losses = []
        for index, batch in enumerate(microbatches):
            with forward_context.frame(self._make_frame(batch, index, None)):
                losses.append(self.axes.compute_loss(self.axes.split_tokens(batch)))
        self.model.train()
        return losses if self.axes.speaks else []

    @torch.no_grad()
    def finish_update(self) -> None:
        for path, module in iterate_listeners(self.model, "", self.plan):
            module.after_step(self.emitted.get(self.plan.get_emit_path(path), {}))

    # --- parameters and shards ---------------------------------------------------------------------------------------

    def parameters(self) -> list[ShardedParam]:
        return [
            ShardedParam(name, part.shape, tuple(map(ParamShard, part.tensors, self._list_shards(part))))
            for name, part in self.trained.items()
        ]

    def map_matrices(
        self, function: Callable[[Tensor, MatrixId], Tensor], inputs: Iterable[tuple[str, Sequence[Tensor]]]
    ) -> Iterator[tuple[str, Sequence[Tensor]]]:
        return self._matrices.map(function, inputs)

    def find_matrix_owners(self, names: Sequence[str]) -> dict[MatrixId, int]:
        return self._matrices.find_owners(names)

    @property
    def _matrices(self) -> Matrices:
        return Matrices(self.registry, self.axes.world, self.parameters(), self.device)

    def shards(self) -> Iterator[Shard]:
        for part in self.parts.values():
            yield from self._list_shards(part)
        for name, buffer in self.buffers.items():
            ((box, primary),) = self.registry.list_rank_boxes(name_model_array(name), self.rank)
            yield Shard(name_model_array(name), tuple(buffer.shape), buffer.dtype, box.offset, buffer, primary)

    def _list_shards(self, part: RowsOf) -> list[Shard]:
        return [
            Shard(name_model_array(part.name), part.shape, tensor.dtype, box.offset, tensor.detach(), primary)
            for tensor, box, primary in zip(part.tensors, part.boxes, part.primary, strict=True)
        ]


def build(config: Rows, job: Job) -> RowsRuntime:
    """Return the runtime of the strategy `rows`."""
    return RowsRuntime(job)
