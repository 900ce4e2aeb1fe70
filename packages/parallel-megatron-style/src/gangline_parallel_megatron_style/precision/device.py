"""Check that a device supports float8 matmuls: the checks of torch 2.13 before it calls cuBLAS or CUTLASS."""

from __future__ import annotations

import torch

from gangline import UserError

CUDA_FOR_BLOCKS = (12, 9)


def refuse(scaling: str, device: str | None) -> None:
    """Raise UserError if this rank's device does not support `scaling`. A CPU supports all scalings, by emulation.

    device: value of `run.device`; None: the GPU if there is one
    """
    if (device or "cuda").split(":")[0] == "cpu" or not torch.cuda.is_available():
        return
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    problem = find_scaling_problem(scaling, capability, torch.version.cuda)
    if problem:
        raise UserError(f"precision=fp8 precision.scaling={scaling} is not supported on the GPU {name}.", *problem)


def find_scaling_problem(scaling: str, capability: tuple[int, int], cuda: str | None) -> tuple[str, str] | None:
    """Return (why, alternative) if a GPU with this compute capability and CUDA cannot use `scaling`, else None."""
    if cuda is None:
        return "float8 matmuls need an NVIDIA GPU.", "precision=bf16"
    has = ".".join(map(str, capability))
    if capability < (8, 9):
        return (
            f"float8 matmuls need compute capability 8.9 (Ada) or 9.0 (Hopper), and this GPU has {has}.",
            "precision=bf16",
        )
    if scaling == "block" and capability[0] != 9:
        return f"Scales per block of 128 need compute capability 9.0 (Hopper), and this GPU has {has}.", _OTHERS
    if scaling == "block" and tuple(map(int, cuda.split(".")[:2])) < CUDA_FOR_BLOCKS:
        return f"Scales per block of 128 need CUDA 12.9, and this torch is built for CUDA {cuda}.", _OTHERS
    return None


_OTHERS = "precision.scaling=row, or tensor"
