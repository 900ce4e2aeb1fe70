"""The global gradient norm of sharded parameters, each element counted once."""

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
    """Gradients of `parameters` after a step: unscaled, their global norm, clipped.

    shapes         shapes of all trained parameters of the run, in the order of one process
    deterministic  whether the norm must be bitwise equal to that of one process
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
        self._replicated = not any(layout.divisions or layout.at for layout in layouts)  # every rank has all gradients
        self._world, self._device = world, device
        # If deterministic, every rank takes part in the sum, whichever arrays it has.
        leaves = [(parameter.name, piece.tensor) for parameter in parameters for piece in parameter.pieces]
        self.measured = MeasuredNorm(leaves, self._measure, is_local=self._replicated and not deterministic)

    def unscale(self, scale: float) -> None:
        """Divide the gradients by the loss scale."""
        gradients = [leaf.grad for leaf in self._leaves if leaf.grad is not None]
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, 1.0 / scale)

    def _measure(self) -> Tensor:
        """Return the global norm, 0-d, float64, equal on all ranks."""
        if self._deterministic:
            return compute_norm_by_rows(self._parameters, self._shapes, self._world, self._device)
        return compute_sharded_norm(self._parameters, None if self._replicated else self._world, self._device)


@mark_traffic("norm")
def compute_sharded_norm(named: Sequence[ShardedParam], world: Comm | None, device: torch.device) -> Tensor:
    """Return the global gradient norm, 0-d, float64: each rank adds the squares of the boxes that it is primary of.

    world: all ranks; None if each rank has all gradients, so that no reduction is needed
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
    """Return the gradient norm, 0-d, float64, bitwise equal to one process that adds squares per row, then by name.

    For run.deterministic. Every rank fills in the rows it is primary of; for a row that is split, its part of the sum.
    `shapes`: shapes of all parameters of the run, in the order of one process.
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
