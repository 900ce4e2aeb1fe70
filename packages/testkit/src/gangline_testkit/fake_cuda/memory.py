"""The memory of a tensor on the fake device as a CPU tensor, and back."""

from __future__ import annotations

import torch
from torch import Tensor


def to_host(x: Tensor) -> Tensor:
    """Return a CPU tensor with the memory of `x`."""
    return torch.ops.fake_cuda.host(x)


def to_device(x: Tensor) -> Tensor:
    """Return a tensor on the fake device with the memory of the CPU tensor `x`."""
    return torch.ops.fake_cuda.device(x)
