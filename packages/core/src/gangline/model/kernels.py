"""Where kernels of our own, in Triton, take the place of plain operators. Each has its plain reference beside it.

A module of kernels ends in `_triton` and is imported where `takes_kernels` says so, and nowhere else.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor


def takes_kernels(x: Tensor) -> bool:
    """Whether a Triton kernel computes with `x`: on a GPU, of 32 bits a number at most, in code that is not compiled.

    torch.compile makes kernels of plain operators itself. With TRITON_INTERPRET=1 Triton interprets kernels: then also
    on a CPU.
    """
    if x.dtype == torch.float64 or torch.compiler.is_compiling() or not _has_triton():
        return False
    return x.is_cuda or (x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    """It comes with torch for NVIDIA's and AMD's GPUs."""
    return find_spec("triton") is not None
