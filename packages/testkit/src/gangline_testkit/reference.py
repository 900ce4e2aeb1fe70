"""Single-process reference for tests of layouts: the unsharded model, trained without code of the parts under test.

The reference shares the model, the plan, the weight initialisation and `forward_context` with the parts under test. It
has its own implementation of the step, the sums, the norm and the update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gangline.batch import Batch
from gangline.model import forward_context
from gangline.model.buffers import iterate_buffers, iterate_listeners, put
from gangline.model.build import construct
from gangline.model.forward_context import Collected, Frame
from gangline.model.init import initialise
from gangline.model.tree import Node
from gangline.plan import Plan
from gangline.shard import Shard, name_model_array


@dataclass
class Expected:
    """Expected results of a step over all ranks, with full arrays."""

    loss_sum: float
    tokens: int
    finite: bool
    norm: float
    gradients: dict[str, Tensor]
    metrics: dict[str, float | list[float]] = field(default_factory=dict)
    shares: list[tuple[float, int]] = field(default_factory=list)  # (loss sum, tokens) of each group of microbatches


class Reference:
    """Full model in one process. Gradients of each group of microbatches are summed separately, as on a data rank."""

    def __init__(self, tree: Node, plan: Plan, *, seed: int, dtype: torch.dtype) -> None:
        self.plan, self.seed, self.dtype = plan, seed, dtype
        self.model = construct(tree)
        self.weights: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self._materialise()
        self.trained = {name: weight for name, weight in self.weights.items() if weight.requires_grad}
        self.velocity = {name: torch.zeros_like(w, requires_grad=False) for name, w in self.trained.items()}
        self._emitted: dict[str, dict[str, Tensor]] = {}

    def _materialise(self) -> None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        names = {id(parameters[name]): name for name in reversed(parameters)}
        for alias, parameter in parameters.items():
            name = self.plan.get_owner(names[id(parameter)])
            if name not in self.weights:
                codes = self.plan.get_dtype(name) == "int8"
                weight, trained = torch.empty(parameter.shape, dtype=self.dtype), not self.plan.is_frozen(name)
                weight = weight.to(torch.int8) if codes else weight
                self.weights[name] = nn.Parameter(weight, requires_grad=trained)
            _put(self.model, alias, self.weights[name])
        for buffer in list(iterate_buffers(self.model)):
            real = torch.empty(buffer.tensor.shape, dtype=buffer.tensor.dtype)
            put(self.model, buffer, real)
            if buffer.saved_name is not None:
                self.buffers[buffer.saved_name] = real
        initialise(
            [
                Shard(name_model_array(name), tuple(array.shape), array.dtype, (0,) * array.dim(), array.detach())
                for name, array in self.get_arrays().items()
            ],
            self.plan,
            self.seed,
        )

    def get_arrays(self) -> dict[str, Tensor]:
        """Return the current weights and persistent buffers by name."""
        return {**{name: weight.detach() for name, weight in self.weights.items()}, **self.buffers}

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return the loss sum of a batch after the embedding, the blocks and the head."""
        hidden = self.model.get_submodule(self.plan.embed)(batch)
        for index in range(self.plan.layers):
            path = f"{self.plan.blocks}.{index}"
            with forward_context.emit_under(path):
                hidden = self.model.get_submodule(path)(hidden, batch)
        return self.model.get_submodule(self.plan.head)(hidden, batch)

    def _make_frame(self, batch: Batch, number: int, coefficient: float, collected: Collected | None) -> Frame:
        return Frame(
            microbatch=number,
            seed=self.seed,
            step=batch.step,
            sample=batch.sample[:, None].expand(batch.shape),
            document=batch.document,
            position=batch.position,
            loss_mask=batch.loss_mask,
            padding=batch.padding,
            coefficient=coefficient,
            collected=collected,
        )

    def step(self, groups: Sequence[Sequence[Batch]]) -> Expected:
        """Run forward and backward over all groups. Gradients are those of (loss + emitted losses) / tokens."""
        tokens = sum(int(batch.loss_mask.sum()) for group in groups for batch in group)
        emissions, loss_sum, number = Collected(), 0.0, 0
        totals: dict[str, Tensor] = {}
        shares = []
        for group in groups:
            for weight in self.trained.values():
                weight.grad = None
            share = 0.0
            for batch in group:
                with forward_context.frame(self._make_frame(batch, number, 1.0 / max(tokens, 1), emissions)) as frame:
                    loss = self.compute_loss(batch)
                    loss.backward(torch.full_like(loss, frame.coefficient))
                share += float(loss.detach().double())
                number += 1
            loss_sum += share
            shares.append((share, sum(int(batch.loss_mask.sum()) for batch in group)))
            for name, weight in self.trained.items():
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                totals[name] = totals[name] + gradient if name in totals else gradient.detach().clone()
        for name, weight in self.trained.items():
            weight.grad = totals[name]
        norm = self.compute_norm()
        metrics = self._reduce(emissions, tokens)
        finite = math.isfinite(loss_sum) and math.isfinite(norm)
        return Expected(loss_sum, tokens, finite, norm, {n: g.clone() for n, g in totals.items()}, metrics, shares)

    def compute_norm(self) -> float:
        """Return the gradient norm: float64 sums of squared rows, added in name order for layout invariance."""
        sums = []
        for weight in self.trained.values():
            assert weight.grad is not None
            rows = weight.grad.reshape(-1, weight.shape[-1]) if weight.dim() > 1 else weight.grad.reshape(1, -1)
            sums.append(rows.double().square().sum(-1).sum())
        return float(torch.stack(sums).sum().sqrt())

    def _reduce(self, collected: Collected, tokens: int) -> dict[str, float | list[float]]:
        self._emitted = {}
        reductions: dict[tuple[str, str], tuple[str, list[Tensor]]] = {}
        for (_, path, name), term in collected.losses.items():
            reductions.setdefault((path, name), ("loss", []))[1].append(term.double())
        for (_, path, name), (value, reduce) in collected.metrics.items():
            reductions.setdefault((path, name), (reduce, []))[1].append(value.double())
        metrics: dict[str, float | list[float]] = {}
        for (path, name), (how, values) in reductions.items():
            stack = torch.stack(values)
            total = stack.amax(0) if how == "max" else stack.sum(0)
            total = total / {"mean": len(values), "loss": max(tokens, 1)}.get(how, 1)
            self._emitted.setdefault(path, {})[name] = total
            metrics[f"{path}/{name}" if path else name] = total.tolist()
        return metrics

    @torch.no_grad()
    def update(self) -> None:
        """Update the weights by `descend`, then call `after_step` of the modules."""
        for name, weight in self.trained.items():
            assert weight.grad is not None
            descend(weight, weight.grad, self.velocity[name])
        for path, module in iterate_listeners(self.model, "", self.plan):
            module.after_step(self._emitted.get(self.plan.get_emit_path(path), {}))

    @torch.no_grad()
    def evaluate(self, groups: Sequence[Sequence[Batch]]) -> tuple[float, int]:
        """Return (loss sum, tokens) over all groups in evaluation mode."""
        loss_sum, tokens = 0.0, 0
        self.model.eval()
        for number, batch in enumerate(batch for group in groups for batch in group):
            with forward_context.frame(self._make_frame(batch, number, 1.0, None)):
                loss_sum += float(self.compute_loss(batch).double())
            tokens += int(batch.loss_mask.sum())
        self.model.train()
        return loss_sum, tokens

    def score(self, batches: Sequence[Batch]) -> Tensor:
        """Return each sample's log-likelihood, from batches of one sample."""
        return torch.tensor([-self.evaluate([[batch]])[0] for batch in batches], dtype=torch.float64)


def descend(weight: Tensor, gradient: Tensor, velocity: Tensor) -> None:
    """Take a momentum step in elementwise operations, so that a shard gets the same bits as the full tensor."""
    velocity.mul_(0.9)
    velocity.add_(gradient)
    weight.sub_(velocity * 0.25)


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, tensor)
