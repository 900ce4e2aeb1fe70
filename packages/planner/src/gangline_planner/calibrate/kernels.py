"""Measurements of a rank's computation: matmuls by dtype and shape, fused attention, memory copies."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from gangline.comm.base import Comm
from gangline.model.matmuls import AttentionMatmuls, Matmul
from gangline_planner.calibrate.clock import measure_seconds

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MATMULS = {  # shapes of matmuls: rows, inner, columns
    "cpu": ((128, 64, 256), (256, 128, 128), (256, 256, 1024), (512, 256, 256), (1024, 512, 1024)),
    "cuda": ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 4096, 14336), (8192, 8192, 8192)),
}
ATTENTION = {  # shapes of attention: sequences, tokens, heads, head dimension
    "cpu": ((2, 128, 4, 32), (1, 512, 4, 32), (1, 256, 4, 64), (1, 1024, 4, 64)),
    "cuda": ((4, 512, 16, 128), (2, 2048, 16, 128), (1, 4096, 32, 128), (1, 8192, 32, 128)),
}


def measure_matmuls(dtype: str, comm: Comm, device: torch.device) -> Mapping[Matmul, float]:
    """Return seconds per matmul by shape: the mean over forward, input gradient and weight gradient of a linear."""
    seconds = {}
    for rows, inner, columns in MATMULS[device.type]:
        x, weight, gradient = (
            torch.randn(shape, device=device).to(DTYPES[dtype])
            for shape in ((rows, inner), (columns, inner), (rows, columns))
        )

        def run_three_matmuls(x: Tensor = x, weight: Tensor = weight, gradient: Tensor = gradient) -> None:
            F.linear(x, weight)
            gradient @ weight
            gradient.t() @ x

        seconds[Matmul(rows=rows, inner=inner, columns=columns)] = measure_seconds(run_three_matmuls, comm, device) / 3
    return seconds


def measure_attention(
    comm: Comm, device: torch.device
) -> tuple[dict[AttentionMatmuls, float], dict[AttentionMatmuls, float]]:
    """Return (forward, backward) seconds of causal fused attention by shape, in float32 on a CPU, bfloat16 on a GPU."""
    ahead, behind, dtype = {}, {}, torch.bfloat16 if device.type == "cuda" else torch.float32
    for sequences, tokens, heads, width in ATTENTION[device.type]:
        q, k, v = (
            torch.randn(sequences, tokens, heads, width, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
            for _ in range(3)
        )
        gradient = torch.randn_like(q)

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def run_both(q: Tensor = q, k: Tensor = k, v: Tensor = v, gradient: Tensor = gradient) -> object:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), gradient)

        once, whole = measure_seconds(forward, comm, device), measure_seconds(run_both, comm, device)
        shape = AttentionMatmuls(
            sequences=sequences, queries=tokens, keys=tokens, heads=heads, kv_heads=heads, head_dim=width
        )
        ahead[shape] = once
        behind[shape] = max(whole - once, once)  # backward takes at least as long as forward
    return ahead, behind


def measure_copy_bandwidth(comm: Comm, device: torch.device) -> float:
    """Return the bytes per second that a copy reads and writes, in sum, for arrays larger than any cache."""
    numbers = 1 << (28 if device.type == "cuda" else 23)
    a, b = torch.randn(numbers, device=device), torch.empty(numbers, device=device)
    return 2 * a.nbytes / measure_seconds(lambda: b.copy_(a), comm, device)
