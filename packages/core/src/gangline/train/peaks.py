"""Peak FLOP/s that MFU is measured against: published dense peaks of known GPUs, a measured one on a CPU."""

from __future__ import annotations

import time

import torch

# Dense TFLOP/s of one device from the vendors' data sheets, one number for each entry of KINDS.
KINDS = ("16 bits", "TF32", "float32", "float64")
GPU_TFLOPS = {
    "H200": (989.0, 494.0, 67.0, 67.0),
    "H100 PCIe": (756.0, 378.0, 51.0, 51.0),
    "H100": (989.0, 494.0, 67.0, 67.0),
    "H800": (989.0, 494.0, 67.0, 1.0),
    "B200": (2250.0, 1125.0, 75.0, 37.0),
    "A100": (312.0, 156.0, 19.5, 19.5),
    "A800": (312.0, 156.0, 19.5, 19.5),
    "L40S": (362.0, 183.0, 91.6, 1.4),
    "V100": (125.0, 15.7, 15.7, 7.8),
    "MI300X": (1307.0, 653.0, 163.4, 163.4),
}


def get_kind(dtype: torch.dtype) -> str:
    """Return the entry of `KINDS` for matmuls of this dtype on a GPU: float32 is TF32 only if torch is set to it."""
    if dtype is torch.float64:
        return "float64"
    if dtype is torch.float32:
        return "float32" if torch.get_float32_matmul_precision() == "highest" else "TF32"
    return "16 bits"


def find_peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """Return (FLOP/s of one device at `dtype`, source of the number); None for a GPU that is not in the table."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        kind = get_kind(dtype)
        for gpu, rates in GPU_TFLOPS.items():
            if gpu in name:
                return rates[KINDS.index(kind)] * 1e12, f"{name}, published dense peak for {kind}"
        return None, f"{name}: published peak unknown"
    # A CPU may emulate a dtype slowly: the peak is then the machine's float32 peak.
    dtypes = {dtype} if dtype is torch.float64 else {dtype, torch.float32}
    return max(map(_measure, dtypes)), "measured: fastest matmul of one thread x number of threads"


def _measure(dtype: torch.dtype, sizes: tuple[int, ...] = (256, 512), seconds: float = 0.06) -> float:
    """Return the FLOP/s of the fastest single-thread matmul in `seconds` per size, times the threads of this process.

    The fastest one counts, because other work of a busy machine slows matmuls down. One small matmul needs one core for
    a third of a millisecond, which is almost always free; all threads at once may not get their cores, and the MFU
    would exceed 1.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return threads * max(_compute_best(dtype, size, seconds) for size in sizes)
    finally:
        torch.set_num_threads(threads)


def _compute_best(dtype: torch.dtype, size: int, seconds: float) -> float:
    """Return the FLOP/s of the fastest (size, size) matmul within `seconds`."""
    a = b = torch.ones(size, size, dtype=dtype)
    best, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
