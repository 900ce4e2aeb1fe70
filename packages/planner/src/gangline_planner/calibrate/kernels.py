"""What a rank computes: products by shape and dtype, fused attention, what moves memory, what the host launches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gangline.comm import Comm
from gangline_planner.calibrate.clock import seconds
from gangline_planner.calibrate.lines import intercept_and_slope

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shapes(large: bool) -> list[tuple[int, int, int]]:
    """(rows, inner, columns): of small models and, on a GPU, of large ones."""
    small = [(64, 64, 64), (256, 128, 128), (256, 256, 1024), (512, 512, 512), (1024, 512, 1024)]
    return [*small, (4096, 4096, 4096), (8192, 4096, 14336), (8192, 8192, 8192)] if large else small


def products(comm: Comm, device: torch.device) -> dict[str, float]:
    """`peak.*`, the rate of large products, and `matmul.half`, by a line through seconds over operations."""
    found = {}
    for name, dtype in DTYPES.items():
        points = []
        for rows, inner, columns in shapes(device.type == "cuda"):
            x, y = (
                torch.randn(rows, inner, device=device).to(dtype),
                torch.randn(inner, columns, device=device).to(dtype),
            )
            points.append((2.0 * rows * inner * columns, seconds(lambda x=x, y=y: x @ y, comm, device)))  # type: ignore[misc]
        start, each = intercept_and_slope(points)
        found[f"peak.{name}"] = 1 / each
        if name == "fp32":
            found["matmul.half"] = start / each
    return found


def attention(comm: Comm, device: torch.device, peak: float) -> dict[str, float]:
    """Rates of causal fused attention in float32 (on a GPU bfloat16), what is hidden passed over."""
    heads, width = 4, 64
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    forward, backward = [], []
    for keys in (128, 512, 1024):
        q, k, v = (torch.randn(1, heads, keys, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        whole = 4.0 * heads * keys * (keys + 1) / 2 * width

        def run(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = run()
        both = seconds(lambda run=run, out=out: run().backward(torch.ones_like(out)), comm, device)  # type: ignore[misc]
        once = seconds(run, comm, device)
        forward.append((whole / keys, once / keys))  # seconds = (1 + half / keys) operations / rate
        backward.append((2.5 * whole / keys, max(both - once, 1e-9) / keys))
    rate = _asymptote(forward)
    keys_half = max(1.0, (forward[0][1] * rate / forward[0][0] - 1) * 128)
    return {
        "attention.efficiency": rate / peak,
        "attention.efficiency_backward": _asymptote(backward) / peak,
        "attention.half": keys_half,
    }


def memory(comm: Comm, device: torch.device) -> dict[str, float]:
    """`memory.bandwidth` of a copy, and how many passes over what they keep elementwise operators take, each apart."""
    numbers = 1 << (28 if device.type == "cuda" else 22)
    a, b = torch.randn(numbers, device=device), torch.empty(numbers, device=device)
    bandwidth = 2 * a.nbytes / seconds(lambda: b.copy_(a), comm, device)
    x, weight = torch.randn(1024, 512, device=device, requires_grad=True), torch.ones(512, device=device)
    gate, up = (torch.randn(1024, 2048, device=device, requires_grad=True) for _ in range(2))

    def elementwise() -> Tensor:
        return (F.rms_norm(x, (512,), weight) + x).sum() + (F.silu(gate) * up).sum()

    kept = 2 * x.nbytes + 4 * gate.nbytes
    passes = seconds(elementwise, comm, device) * bandwidth / kept
    return {"memory.bandwidth": bandwidth, "elementwise.passes_apart": passes, "elementwise.passes": passes}


def launches(comm: Comm, device: torch.device) -> dict[str, float]:
    """Of a module so small that it takes no time itself; of an optimizer's step over small weights."""
    tiny = torch.nn.Sequential(*(torch.nn.Linear(8, 8, device=device) for _ in range(16)))
    x = torch.randn(8, 8, device=device)
    optimizer = torch.optim.AdamW(tiny.parameters())

    def backward() -> None:
        tiny(x).sum().backward()

    module = seconds(lambda: tiny(x), comm, device) / 16
    backward()
    return {"module.seconds": module, "host.seconds": seconds(optimizer.step, comm, device)}


def _asymptote(points: list[tuple[float, float]]) -> float:
    """Operations a second of the longest."""
    flops, taken = points[-1]
    return flops / taken
