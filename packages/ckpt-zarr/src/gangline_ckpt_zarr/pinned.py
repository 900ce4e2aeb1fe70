"""Pinned (page-locked) host memory: GPU copies run at full speed, and beside kernels."""

from __future__ import annotations

from contextlib import suppress

import torch


def pin(memory: torch.Tensor) -> bool:
    """Pin a host tensor for the thread's current GPU; return False if the system refuses it."""
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    except RuntimeError:  # a limit on locked memory, or a driver without support
        # CUDA raises the error again at the next kernel launch: launch a kernel here, so that no step fails.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return False
    return True


def release(memory: torch.Tensor) -> None:
    """Release a tensor that `pin` has pinned, before its memory is freed."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
