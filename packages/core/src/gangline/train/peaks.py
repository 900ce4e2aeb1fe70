"""The peak that MFU is measured against: published dense rates of known GPUs, a measured one on a CPU."""

from __future__ import annotations

import time

import torch

# Dense TFLOP/s of one device, from the vendors' data sheets (without sparsity): (16-bit, TF32 for float32 matmuls).
GPU_TFLOPS = {
    "H200": (989.0, 494.0),
    "H100 PCIe": (756.0, 378.0),
    "H100": (989.0, 494.0),
    "H800": (989.0, 494.0),
    "B200": (2250.0, 1125.0),
    "A100": (312.0, 156.0),
    "A800": (312.0, 156.0),
    "L40S": (362.0, 183.0),
    "V100": (125.0, 15.7),
    "MI300X": (1307.0, 653.0),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """(FLOP/s of one device at `dtype`, where the number is from). None for a GPU that is not in the table."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, (half, single) in GPU_TFLOPS.items():
            if known in name:
                rate = half if dtype in (torch.bfloat16, torch.float16) else single
                return rate * 1e12, f"{name}, published dense {str(dtype).removeprefix('torch.')} rate"
        return None, f"{name}: no published rate known"
    # Slow dtypes on a CPU are emulated; the peak stays what the machine can do in float32.
    return _measured(
        torch.float64 if dtype is torch.float64 else torch.float32
    ), "measured: the best of many matmuls of 512³"


def _measured(dtype: torch.dtype, size: int = 512, seconds: float = 0.15) -> float:
    """The fastest of all matmuls that fit in `seconds`: on a busy machine the others measure its other work."""
    a = b = torch.ones(size, size, dtype=dtype)
    best, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
