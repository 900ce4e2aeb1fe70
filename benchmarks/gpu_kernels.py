"""Measure single kernels of a training step, relative to memory bandwidth or peak FLOP/s. See `gpu.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from gpu_places import LeftOut, Place, apart, within
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gangline.model.calls import AttentionCall
from gangline_basics.model import documents
from gangline_basics.model.attention import get_plain_attention
from gangline_basics.model.loss import CrossEntropy

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def both(place: Place, forward: Callable[[], Tensor], inputs: list[Tensor]) -> tuple[float, float]:
    """Return the seconds of the forward pass and of the backward pass."""
    grad = torch.randn_like(forward())
    forth = place.seconds(forward)
    out = forward()
    back = place.seconds(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True))
    return forth, back


def attention(place: Place) -> str:
    """Measure causal attention of 32 query and 8 key heads of width 128, with the default and with each kernel."""
    said = []
    for B, T in ((2, 4096), (1, 8192)) if not place.tiny else ((1, 64),):
        H, K, C = (32, 8, 128) if not place.tiny else (4, 2, 16)
        dtype = torch.bfloat16 if place.cuda else torch.float32
        q, k, v = (
            torch.randn(B, n, T, C, device=place.device, dtype=torch.float32).to(dtype).requires_grad_()
            for n in (H, K, K)
        )
        flops = 4 * B * H * T * T * C / 2  # causal: half of the scores are visible

        def told(name: str, call: Callable[[], Tensor]) -> str:
            try:
                forth, back = both(place, call, [q, k, v])  # noqa: B023
            except RuntimeError as error:
                return f"{name} failed ({str(error).splitlines()[0][:60]})"
            return f"{name} {flops / forth / 1e12:.3g}/{2.5 * flops / back / 1e12:.3g}"  # noqa: B023

        default = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        found = [told("default", default)]
        if place.cuda:
            for name, backend in BACKENDS.items():
                with sdpa_kernel(backend):
                    found.append(told(name, default))
        position = torch.arange(T, device=place.device).expand(B, T)
        document = (position * 4 // T).contiguous()  # four documents per row: a quarter of the work
        found.append(told("4 documents", lambda: get_plain_attention(AttentionCall())(q, k, v, document, position)))  # noqa: B023
        plain = get_plain_attention(AttentionCall(window=1024))
        found.append(told("window 1024", lambda: plain(q, k, v, None, position)))  # noqa: B023
        said.append(f"T={T}: {', '.join(found)}")
    return "TFLOP/s forward/backward (causal FLOPs): " + "; ".join(said)


def cross_entropy(compiled: bool) -> Callable[[Place], str]:
    """Return a measurement of the head's matmul and loss (vocabulary 128,256): gangline's, in chunks, and torch's."""

    def rate(place: Place) -> str:
        from gangline_basics.model import loss

        N, D, V = (8192, 4096, 128_256) if not place.tiny else (64, 16, 256)
        dtype = torch.bfloat16 if place.cuda else torch.float32
        h = torch.randn(1, N, D, device=place.device).to(dtype).requires_grad_()
        w = (torch.randn(V, D, device=place.device) * 0.02).to(dtype).requires_grad_()
        targets = torch.randint(V, (1, N), device=place.device)
        counts = torch.ones(1, N, dtype=torch.bool, device=place.device)
        flops = 6 * N * D * V
        said = []
        kinds: dict[str, Callable[[], Tensor]] = {
            "gangline": lambda: CrossEntropy()(h, w, targets, counts),
            "gangline, chunks of 1024": lambda: CrossEntropy(chunk=1024)(h, w, targets, counts),
            "torch": lambda: F.cross_entropy(
                loss.compute_logits(h, w).flatten(0, 1).float(), targets[0], reduction="sum"
            ),
        }
        if compiled:
            kinds = {f"{name}, compiled": torch.compile(call) for name, call in kinds.items() if "chunks" not in name}
        for name, call in kinds.items():
            if place.cuda:
                torch.cuda.reset_peak_memory_stats(place.device)
            whole = place.seconds(lambda: torch.autograd.grad(call(), (h, w)), 5)  # noqa: B023
            most = torch.cuda.max_memory_allocated(place.device) / 1e9 if place.cuda else 0.0
            said.append(f"{name} {1e3 * whole:.3g} ms, {flops / whole / 1e12:.3g} TFLOP/s, peak {most:.3g} GB")
        return "; ".join(said)

    return rate


def adamw(place: Place) -> str:
    """Measure the optimizer on 0.5 G weights; each weight reads or writes 28 bytes (weight, gradient, two moments)."""
    from torch.optim.adamw import adamw

    count = place.sized(1 << 24, 1 << 10)
    weights, grads, ones, twos = ([torch.randn(count, device=place.device) for _ in range(32)] for _ in range(4))
    twos = [x.square_() for x in twos]
    said = []
    for fused in (True, False):
        steps = [torch.zeros((), device=place.device if fused else "cpu") for _ in weights]
        seconds = place.seconds(
            lambda: adamw(
                weights,
                grads,
                ones,
                twos,
                [],
                steps,  # noqa: B023
                fused=fused,  # noqa: B023
                foreach=not fused,  # noqa: B023
                amsgrad=False,
                maximize=False,
                lr=1e-6,
                weight_decay=0.1,
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
            )
        )
        said.append(f"{'fused' if fused else 'foreach'} {28 * 32 * count / seconds / 1e9:,.0f} GB/s")
    return ", ".join(said)


def weight_gradients(place: Place) -> str:
    """Measure bfloat16 dY^T X into float32: as a matmul, a cast and an addition, or a matmul with a float32 result."""
    place.needs_cuda("a matmul with a result of another dtype")
    n, i, o = 8192, 4096, 14336
    x, dy = (torch.randn(n, width, device=place.device).bfloat16() for width in (i, o))
    slot = torch.zeros(o, i, device=place.device)
    kinds: dict[str, Callable[[], object]] = {
        "bf16 matmul": lambda: dy.t() @ x,
        "bf16 matmul, cast and addition": lambda: slot.add_((dy.t() @ x).float()),
        "float32 result": lambda: torch.mm(dy.t(), x, out_dtype=torch.float32),
        "float32 result into the gradient": lambda: torch.mm(dy.t(), x, out_dtype=torch.float32, out=slot),
        "float32 result added to the gradient": lambda: torch.addmm(slot, dy.t(), x, out_dtype=torch.float32, out=slot),
    }
    said = []
    for name, call in kinds.items():
        try:
            said.append(f"{name} {1e3 * place.seconds(call):.3g} ms")
        except (RuntimeError, TypeError) as error:
            said.append(f"{name} failed ({str(error).splitlines()[0][:60]})")
    return ", ".join(said)


def documents_kernel(place: Place) -> str:
    """Check whether documents use torch's varlen attention on this machine, and compare it with a plain formula."""
    place.needs_cuda("varlen attention")
    if documents._find_kernel() is None:
        raise LeftOut(f"torch {torch.__version__} lacks varlen attention with the required keywords")
    found: dict[str, float] = {}
    for H, K in ((4, 4), (8, 2)):
        B, T, C = 2, 512, 64
        given = [torch.randn(B, n, T, C, dtype=torch.float64) for n in (H, K, K)]
        position = torch.arange(T).expand(B, T)
        document = torch.stack([(position[0] >= 100).long() + (position[0] >= 357), (position[0] >= 1).long()])
        grad = torch.randn(B, H, T, C, dtype=torch.float64)
        results = []
        for device, dtype in ((place.device, torch.bfloat16), (torch.device("cpu"), torch.float64)):
            q, k, v = (x.to(torch.bfloat16).to(device, dtype).requires_grad_() for x in given)
            out = get_plain_attention(AttentionCall())(q, k, v, document.to(device), position.to(device))
            results.append([out, *torch.autograd.grad(out, (q, k, v), grad.to(device, dtype))])
        names = ("out", "dq", "dk", "dv")
        found |= {f"{n}, {H}/{K} heads": apart(a, b) for n, a, b in zip(names, *results, strict=True)}
    return within(found, 2e-2)


RATES: dict[str, Callable[[Place], str]] = {
    "attention kernels": attention,
    "cross-entropy": cross_entropy(False),
    "AdamW": adamw,
    "gradients of weights": weight_gradients,
}
COMPILED: dict[str, Callable[[Place], str]] = {"cross-entropy, compiled": cross_entropy(True)}
