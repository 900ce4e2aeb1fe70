"""Deterministic kernels for `run.deterministic` on a GPU: the same bits in every run."""

from __future__ import annotations

import os

import torch


def use_deterministic_kernels(device: torch.device) -> None:
    """Make every operation on `device` bitwise repeatable; an operation without a deterministic kernel then raises.

    Called before the first operation, because cuBLAS reads its workspace setting when it starts. CPU kernels are always
    repeatable.
    """
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # writes every new tensor
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
