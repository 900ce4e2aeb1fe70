"""The global gradient norm (L2) of sharded parameters; replicated elements count once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from gangline.comm.base import Comm
from gangline.comm.purpose import mark_traffic
from gangline.runtime import ShardedParam
from gangline.shard import Registry, name_model_array
from gangline_basics.parallel.norm import MeasuredNorm, compute_norm, sum_row_squares


class GradNorm:
    """Unscaling, global norm and clipping of the gradients of `parameters` after a step.

    shapes         shapes of all trained parameters of the run, in the parameter order of a one-process run
    deterministic  whether the norm must be bitwise equal to the norm in a one-process run
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParam],
        registry: Registry,
        shapes: Mapping[str, tuple[int, ...]],
        world: Comm,
        device: torch.device,
        deterministic: bool,
    ) -> None:
        self._parameters, self._shapes, self._deterministic = parameters, shapes, deterministic
        self._leaves = [piece.tensor for parameter in parameters for piece in parameter.pieces]
        layouts = [registry[name_model_array(name)] for name in shapes]
        self._replicated = not any(layout.divisions or layout.at for layout in layouts)  # every rank has every gradient
        self._world, self._device = world, device
        # If deterministic, every rank takes part in the sum, even a rank that has every gradient.
        leaves = [(parameter.name, piece.tensor) for parameter in parameters for piece in parameter.pieces]
        self.measured = MeasuredNorm(leaves, self._measure, is_local=self._replicated and not deterministic)

    def unscale(self, scale: float) -> None:
        """Divide the gradients by the loss scale."""
        gradients = [leaf.grad for leaf in self._leaves if leaf.grad is not None]
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, 1.0 / scale)

    def _measure(self) -> Tensor:
        """Return the global gradient norm, 0-d, float64, equal on all ranks."""
        if self._deterministic:
            return compute_norm_by_rows(self._parameters, self._shapes, self._world, self._device)
        return compute_sharded_norm(self._parameters, None if self._replicated else self._world, self._device)


@mark_traffic("norm")
def compute_sharded_norm(named: Sequence[ShardedParam], world: Comm | None, device: torch.device) -> Tensor:
    """Return the global gradient norm, 0-d, float64: each rank adds the squares of the boxes of which it is primary.

    world: communicator of all ranks; None if each rank has all gradients, which needs no reduction
    """
    pieces = [piece for parameter in named for piece in parameter.pieces]
    tensors = [piece.tensor for piece in pieces if world is None or piece.shard.primary]
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    if gradients:
        norms = torch._foreach_norm(gradients)
        total = torch.stack(norms).double().square().sum().to(device)
    else:
        total = torch.zeros((), dtype=torch.float64, device=device)
    return (total if world is None else world.all_reduce(total.reshape(1))[0]).sqrt()


@mark_traffic("norm")
def compute_norm_by_rows(
    named: Sequence[ShardedParam], shapes: Mapping[str, tuple[int, ...]], world: Comm, device: torch.device
) -> Tensor:
    """Return the gradient norm, 0-d, float64, bitwise equal to the norm in a one-process run: for run.deterministic.

    One process adds the squares of each row, then the rows in order of parameters. Every rank fills in the rows of
    which it is primary; of a row that is split over ranks, each rank fills in its part of the sum.
    shapes: shapes of all trained parameters of the run, in the parameter order of a one-process run
    """
    rows = {name: prod(shape[:-1]) for name, shape in shapes.items()}
    squares = {name: torch.zeros(count, dtype=torch.float64, device=device) for name, count in rows.items()}
    for parameter in named:
        row_squares = squares[parameter.name].view(parameter.shape[:-1])
        for piece in parameter.pieces:
            if piece.shard.primary:
                assert piece.tensor.grad is not None
                here = sum_row_squares(piece.tensor.grad).to(device)
                row_squares[piece.shard.box.slices[:-1]] += here.view(piece.tensor.shape[:-1])
    flat = world.all_reduce(torch.cat(list(squares.values())))
    return compute_norm(flat.split(list(rows.values())))
