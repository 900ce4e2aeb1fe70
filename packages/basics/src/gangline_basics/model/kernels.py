"""Where kernels of our own, in Triton, take the place of plain operators. Each has its plain reference beside it.

A module of kernels ends in `_triton` and is imported where `takes_kernels` says so, and nowhere else.
"""

from __future__ import annotations

import os
import warnings
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor


def takes_kernels(x: Tensor) -> bool:
    """Whether a Triton kernel computes with `x`: on a GPU, of 32 bits a number at most, in code that is not compiled.

    torch.compile makes kernels of plain operators itself. With TRITON_INTERPRET=1 Triton interprets kernels: then also
    on a CPU. Triton launches on the current GPU alone.
    """
    if x.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    if x.is_cuda:
        return x.device.index == torch.cuda.current_device() and _has_triton() and _launches()
    return x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1" and _has_triton()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    """It comes with torch for NVIDIA's and AMD's GPUs."""
    return find_spec("triton") is not None


@lru_cache(maxsize=1)
def _launches() -> bool:
    """Return whether Triton can launch kernels on this machine; warn where it cannot.

    It builds its launcher with a C compiler and Python's headers, in a cache folder under the home directory.
    """
    from triton.runtime import driver

    try:
        return bool(driver.active.utils)
    except Exception as error:  # whatever a compiler, a loader or a file system says
        warnings.warn(
            f"Triton cannot launch kernels ({error}): plain operators take their place, which are slower. "
            "Install gcc and Python's headers, and set TRITON_CACHE_DIR to a folder that can be written.",
            stacklevel=2,
        )
        return False
