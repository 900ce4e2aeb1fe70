"""What all cut modules of a model share, and what their autograd functions ask of weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.comm.base import Comm
from gangline.precision import Precision


@dataclass
class Setting:
    """The ranks of the axis `tp`, how to multiply, and whether a rank holds its own run of tokens between regions.

    The last is off while a text is written, one token at a time.
    """

    comm: Comm
    precision: Precision
    sequence_parallel: bool


def make_anchor(*weights: Tensor | None) -> Tensor | None:
    """What makes autograd call a backward where only weights, which it does not see, want gradients."""
    if torch.is_grad_enabled() and any(is_trained(w) for w in weights):
        return torch.empty(0, requires_grad=True)
    return None


def is_trained(weight: Tensor | None) -> bool:
    """Whether there is such a weight, and it is trained."""
    return weight is not None and weight.requires_grad
