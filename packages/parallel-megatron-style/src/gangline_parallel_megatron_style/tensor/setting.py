"""State that all tensor-parallel modules of a model share, and helpers of their autograd functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.comm.base import Comm
from gangline.precision import Precision


@dataclass
class Setting:
    """State of tensor parallelism: communicator of the axis `tp`, precision, and whether sequence parallelism is on.

    Sequence parallelism is off during text generation, which runs one token at a time.
    """

    comm: Comm
    precision: Precision
    sequence_parallel: bool


def make_anchor(*weights: Tensor | None) -> Tensor | None:
    """Return an empty tensor that requires a gradient if any weight is trained, else None.

    As an input of an autograd function, it makes autograd call the backward although the weights are hidden in a tuple.
    """
    if torch.is_grad_enabled() and any(is_trained(w) for w in weights):
        return torch.empty(0, requires_grad=True)
    return None


def is_trained(weight: Tensor | None) -> bool:
    """Return whether a weight exists and is trained."""
    return weight is not None and weight.requires_grad
