"""The global gradient norm.

Under `run.deterministic` squares are added per row, then per name, in float64: a sum that comes out the same
however the rows are spread over ranks (one sum over a whole tensor differs from the sum over its pieces).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def row_squares(gradient: Tensor) -> Tensor:
    """Sums of squares over the last dim, float64, shape (rows,); an array of at most one dim is one row."""
    rows = gradient.reshape(-1, gradient.shape[-1]) if gradient.dim() > 1 else gradient.reshape(1, -1)
    return rows.double().square().sum(-1)


def ordered_norm(squares: Sequence[Tensor]) -> Tensor:
    """The norm from each name's `row_squares`, all its rows in order, names in order: 0-d, float64."""
    return torch.stack([rows.sum() for rows in squares]).sum().sqrt()


def global_norm(gradients: Sequence[Tensor], deterministic: bool) -> Tensor:
    """The norm of gradients that this rank holds whole, 0-d; nan or inf where one of them is not finite."""
    if deterministic:
        return ordered_norm([row_squares(gradient) for gradient in gradients])
    return get_total_norm(gradients)


def clip(parameters: Sequence[Tensor], max_norm: float, norm: Tensor, value: float) -> None:
    """Scale `.grad` so that the norm, `norm` on the device and `value` here, becomes at most `max_norm`.

    torch multiplies by 1 where nothing is to be done; that pass over all gradients is saved here, with a margin so
    that rounding cannot decide otherwise than torch would.
    """
    if value > max_norm * (1 - 1e-5):
        clip_grads_with_norm_(parameters, max_norm, norm.to(parameters[0].dtype))
