"""Choice between gangline's Triton kernels and plain operators. Each kernel has a plain reference next to it.

A module of kernels has a name that ends in `_triton`. It is imported only if `takes_kernels` returns True.
"""

from __future__ import annotations

import os
import warnings
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor


def takes_kernels(x: Tensor) -> bool:
    """Return whether a Triton kernel computes with `x`: on a GPU, at most 32 bits per element, outside torch.compile.

    In a compiled graph, torch.compile generates kernels from the plain operators. With TRITON_INTERPRET=1 Triton
    interprets kernels, so they also run on a CPU. Triton launches kernels only on the current GPU.
    """
    if x.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    if x.is_cuda:
        return x.device.index == torch.cuda.current_device() and _has_triton() and _launches()
    return x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1" and _has_triton()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    """Return whether Triton is installed; torch for NVIDIA's and AMD's GPUs includes it."""
    return find_spec("triton") is not None


@lru_cache(maxsize=1)
def _launches() -> bool:
    """Return whether Triton can launch kernels on this machine, and warn if it cannot.

    Triton builds its launcher with a C compiler and Python's headers, in a cache folder under the home directory.
    """
    from triton.runtime import driver

    try:
        return bool(driver.active.utils)
    except Exception as error:  # compiler, loader and file system raise different errors
        warnings.warn(
            f"Triton cannot launch kernels ({error}), so slower plain operators are used. "
            "Install gcc and Python's headers, and set TRITON_CACHE_DIR to a writable directory.",
            stacklevel=2,
        )
        return False
