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
    # Slow dtypes on a CPU are emulated: the peak is then what the machine can do in float32.
    dtypes = {dtype} if dtype is torch.float64 else {dtype, torch.float32}
    return max(map(_measured, dtypes)), "measured: the best matmul of one thread, times threads"


def _measured(dtype: torch.dtype, sizes: tuple[int, ...] = (256, 512), seconds: float = 0.06) -> float:
    """The fastest of all matmuls of one thread that fit in `seconds` a size, times the threads of this process.

    On a busy machine the slower ones measure its other work. A small one needs one core for a third of a millisecond,
    which it gets almost anywhere; all threads at once may not get theirs in the whole time, and then the model would
    seem to do more than the machine can.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return threads * max(_best(dtype, size, seconds) for size in sizes)
    finally:
        torch.set_num_threads(threads)


def _best(dtype: torch.dtype, size: int, seconds: float) -> float:
    """FLOP/s of the fastest."""
    a = b = torch.ones(size, size, dtype=dtype)
    best, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
