"""Measure the throughput of the device in the operations of a run, each with its baseline. See `gpu.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from gpu_places import CPU, LeftOut, Place, Trainer
from torch import Tensor, nn

from gangline.config.schema import Run
from gangline.model.compose import compose_model
from gangline.model.flops import count_flops_per_token
from gangline.train.peaks import find_peak_flops
from gangline_basics.model.config import DecoderConfig
from gangline_moe.matmuls import PlainMatmuls
from gangline_testkit.runs import build_small_run

LAYERS, STEPS, WARM = 4, 6, 3


def of_8b(place: Place, *words: str) -> Run:
    """Return a run with a few blocks of Llama 3 8B (arXiv 2407.21783, table 3) and a vocabulary of negligible cost."""
    wide = ("model.dim=4096", "model.heads=32", "model.kv_heads=8", "model.ffn_dim=14336", "batch.sequence_length=4096")
    narrow = ("model.dim=64", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=128", "batch.sequence_length=64")
    return build_small_run(
        *(narrow if place.tiny else wide),
        f"model.layers={LAYERS}",
        "model.vocab_size=8192" if not place.tiny else "model.vocab_size=256",
        "model.qk_norm=false",
        "batch.global_size=4",
        "batch.micro_size=2",
        "run.deterministic=false",
        *words,
    )


def of_30b_a3b(place: Place, *words: str) -> Run:
    """Return a run with a few blocks of Qwen3 30B-A3B (128 experts, 8 active) and a small vocabulary."""
    wide = (
        *("model.dim=2048", "model.heads=32", "model.kv_heads=4", "model.head_dim=128", "model.ffn_dim=6144"),
        *("moe=qwen3_30b_a3b", "batch.sequence_length=4096", "model.vocab_size=8192"),
    )
    narrow = (
        *("model.dim=64", "model.heads=4", "model.kv_heads=2", "model.ffn_dim=128", "batch.sequence_length=64"),
        *("moe=on", "moe.experts=8", "model.vocab_size=256"),
    )
    return build_small_run(
        *(narrow if place.tiny else wide),
        f"model.layers={LAYERS}",
        "batch.global_size=4",
        "batch.micro_size=2",
        "run.deterministic=false",
        *words,
    )


def peak(place: Place, dtype: torch.dtype = torch.bfloat16) -> tuple[float, str]:
    """Return (peak FLOP/s, source): published, or of the best matmul measured on this machine."""
    known, source = find_peak_flops(place.device, dtype)
    return (known, source) if known else (dense(place), "measured here")


def dense(place: Place, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the FLOP/s of one large matmul of random numbers, which needs more power than a matmul of zeros."""
    size = place.sized(8192, 128)
    dtype = dtype if place.cuda else torch.float32
    a, b = (torch.randn(size, size, device=place.device).to(dtype) for _ in range(2))
    return 2 * size**3 / place.seconds(lambda: a @ b)


def measure_dense_matmul(place: Place) -> str:
    """Measure a dense matmul: the upper bound for all other lines, relative to the published peak."""
    rate, (best, source) = dense(place), peak(place)
    return f"{rate / 1e12:.4g} TFLOP/s in a dense matmul, {rate / best:.1%} of the peak ({source})"


# --- blocks ----------------------------------------------------------------------------------------------------------


def blocks(precision: str, *words: str, of: Callable[..., Run] = of_8b) -> Callable[[Place], str]:
    """Return a measurement of full steps of gangline's loop: forward, backward, clip, optimizer."""

    def rate(place: Place) -> str:
        run = of(place, f"precision={precision}", *words)
        trainer = Trainer.of(run, place.device, drawn=False)
        trainer.prepare(0, STEPS + WARM, "whole")
        seconds = _per_step(place, lambda number: trainer.step(number, "whole"))
        return f"{_share(place, run, seconds)}; {_memory(place)}"

    return rate


def _per_step(place: Place, step: Callable[[int], object]) -> float:
    """Return the seconds per step of several steps without a synchronization between them."""
    warm, count = (1, 2) if place.tiny else (WARM, STEPS)
    for number in range(warm):
        step(number)
    place.wait()
    began = time.perf_counter()
    for number in range(count):
        step(warm + number)
    place.wait()
    return (time.perf_counter() - began) / count


def _share(place: Place, run: Run, seconds: float) -> str:
    tree, plan = compose_model(run)
    tokens = run.batch.global_size * run.batch.sequence_length
    achieved = count_flops_per_token(tree, run.batch.sequence_length, plan) * tokens / seconds
    return (
        f"{tokens / seconds:,.0f} tokens/s, {achieved / 1e12:.4g} TFLOP/s, MFU {achieved / peak(place)[0]:.1%} (bf16)"
    )


def _memory(place: Place) -> str:
    if not place.cuda:
        return "memory is measured only on GPUs"
    most = torch.cuda.max_memory_allocated(place.device) / 1e9
    torch.cuda.reset_peak_memory_stats(place.device)
    return f"peak {most:.3g} GB"


class BareBlock(nn.Module):
    """A block in plain PyTorch: two fused projections, torch's norm and attention."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, dim // heads
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.width, bias=False)
        self.out, self.down = nn.Linear(dim, dim, bias=False), nn.Linear(hidden, dim, bias=False)
        self.up = nn.Linear(dim, 2 * hidden, bias=False)
        self.before, self.between = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = self.qkv(normed(x, self.before)).unflatten(-1, (-1, self.width)).transpose(1, 2).split(sizes, dim=1)
        q, k = (self._turned(y, cos, sin) for y in (q, k))
        grouped = self.heads > self.kv_heads
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        gate, up = self.up(normed(x, self.between)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    @staticmethod
    def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def normed(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """Normalise in one kernel, which needs a gain in the dtype of `x`."""
    return F.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)


def bare(compiled: bool) -> Callable[[Place], str]:
    """Return a measurement of the same model in a plain loop: autocast from float32 to bfloat16, fused AdamW, clip."""

    def rate(place: Place) -> str:
        run = of_8b(place)
        m, batch, device = run.model, run.batch, place.device
        assert isinstance(m, DecoderConfig)
        rows, length = batch.micro_size or 1, batch.sequence_length
        with device:
            embed, head = nn.Embedding(m.vocab_size, m.dim), nn.Linear(m.dim, m.vocab_size, bias=False)
            layers = [BareBlock(m.dim, m.heads, m.kv_heads or m.heads, m.ffn_dim) for _ in range(LAYERS)]
            last = nn.RMSNorm(m.dim)
            model = nn.ModuleList([embed, head, *layers, last])
            half = torch.arange(m.dim // m.heads // 2) * (-2 / (m.dim // m.heads))
            angle = torch.arange(length)[:, None] * 10_000.0**half
            cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
            tokens = torch.randint(m.vocab_size, (rows, length))
        if compiled:
            for layer in layers:
                layer.compile()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step(number: int) -> None:
            for _ in range(batch.global_size // rows):
                with torch.autocast(device.type, torch.bfloat16):
                    x = embed(tokens).bfloat16()
                    for layer in layers:
                        x = layer(x, cos, sin)
                    logits = head(normed(x, last))
                F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return f"{_share(place, run, _per_step(place, step))}; {_memory(place)}"

    return rate


# --- matmuls of experts ----------------------------------------------------------------------------------------------


def experts(place: Place) -> str:
    """Measure the grouped matmul of 64 experts of 2048 x 1408 over 65,536 rows, unevenly divided over the experts."""
    E, I, O = place.sized(64, 4), place.sized(2048, 32), place.sized(1408, 32)
    A, dtype = place.sized(65536, 128), torch.bfloat16 if place.cuda else torch.float32
    uneven = torch.rand(E, generator=torch.Generator().manual_seed(1)) + 0.5
    counts = (uneven / uneven.sum() * A).long()
    counts[-1] += A - counts.sum()
    bounds = F.pad(counts.cumsum(0), (1, 0)).to(place.device)
    x, w = (torch.randn(*shape, device=place.device).to(dtype) for shape in ((A, I), (E, O, I)))
    y = torch.randn(A, O, device=place.device).to(dtype)
    made, found = PlainMatmuls(), []
    for name, call in (
        ("forward", lambda: made.multiply_rows(x, w, bounds)),
        ("input gradient", lambda: made.compute_grad_x(y, w, bounds)),
        ("weight gradient", lambda: made.compute_grad_w(y, x, bounds)),
    ):
        rate = 2 * A * I * O / place.seconds(call)
        found.append(f"{name} {rate / 1e12:.4g} TFLOP/s ({rate / peak(place)[0]:.0%})")
    return f"{', '.join(found)} of the peak; dense matmul {dense(place) / 1e12:.4g} TFLOP/s"


# --- memory ----------------------------------------------------------------------------------------------------------


def staging(place: Place) -> str:
    """Measure copies from the device to the host: pinned, pageable, and into rows of a wider pinned buffer."""
    place.needs_cuda("a copy to the host")
    rows, columns = 64, place.sized(1 << 22, 1 << 12)
    x = torch.randn(rows, columns, device=place.device)
    wider = torch.empty(rows, columns + 1024, pin_memory=True)[:, :columns]
    found = {
        "pinned": torch.empty_like(x, device=CPU, pin_memory=True),
        "strided": wider,
        "pageable": torch.empty_like(x, device=CPU),
    }
    rates = [
        f"{name} {x.nbytes / 1e9 / place.seconds(partial(into.copy_, x, non_blocking=True), 5):.3g} GB/s"
        for name, into in found.items()
    ]
    return ", ".join(rates)


def memory(place: Place) -> str:
    """Measure the bandwidth of a copy inside the device, counting bytes read and written."""
    x = torch.randn(place.sized(1 << 30, 1 << 14), device=place.device)
    y = torch.empty_like(x)
    return f"{2 * x.nbytes / 1e9 / place.seconds(lambda: y.copy_(x)):,.0f} GB/s"


def saving(place: Place) -> str:
    """Measure the staging of checkpoint=zarr: the time that a save would block the step."""
    from gangline.mesh import Mesh
    from gangline_ckpt_zarr.format.packed import PackedFiles
    from gangline_ckpt_zarr.save.staging import Staging

    trainer = Trainer.of(of_8b(place), place.device, drawn=False)
    shards, buffer = list(trainer.runtime.shards()), Staging()
    file = PackedFiles(trainer.runtime.registry).get_rank_file(Mesh.of({}).rank({}))
    try:
        seconds = place.seconds(lambda: buffer.fill(file, shards), 3)
    finally:
        buffer.close()
    return f"{file.size / 1e9:.3g} GB in {seconds:.3g} s, {file.size / 1e9 / seconds:.3g} GB/s"


def fp8(scaling: str) -> Callable[[Place], str]:
    """Return a measurement of a linear layer in float8 (with quantisation) and bfloat16, forward and backward."""

    def rate(place: Place) -> str:
        from gangline_parallel_megatron_style.precision.device import find_scaling_problem
        from gangline_parallel_megatron_style.precision.fp8 import RECIPES, Fp8Precision

        if place.cuda:
            why = find_scaling_problem(scaling, torch.cuda.get_device_capability(place.device), torch.version.cuda)
            if why:
                raise LeftOut(why[0])
        n, i, o = (place.sized(size, 64) for size in (8192, 4096, 14336))
        x, w, dy = (
            torch.randn(*shape, device=place.device).bfloat16().requires_grad_() for shape in ((n, i), (o, i), (n, o))
        )
        made = Fp8Precision(RECIPES[scaling])

        def ours() -> object:
            return torch.autograd.grad(made.linear(x, w), (x, w), dy)

        def plain() -> object:
            return torch.autograd.grad(F.linear(x, w), (x, w), dy)

        flops, times = 6 * n * i * o, (place.seconds(ours), place.seconds(plain))
        return (
            f"{flops / times[0] / 1e12:.4g} TFLOP/s, {times[1] / times[0]:.2f} x bf16 ({flops / times[1] / 1e12:.4g})"
        )

    return rate


RATES: dict[str, Callable[[Place], str]] = {
    "dense matmul": measure_dense_matmul,
    "memory": memory,
    "staging rate": staging,
    "zarr's staging": saving,
    "8B blocks, bf16": blocks("bf16"),
    "8B blocks, fp8": blocks("fp8"),
    "8B blocks, muon": blocks("bf16", "optimizer=muon"),
    "30B-A3B blocks, bf16": blocks("bf16", of=of_30b_a3b),
    "bare loop": bare(False),
    "grouped rate": experts,
    **{f"fp8 linear, {scaling}": fp8(scaling) for scaling in ("tensor", "row", "block")},
}
COMPILED: dict[str, Callable[[Place], str]] = {
    "8B blocks, bf16, compiled": blocks("bf16", "run.compile=true"),
    "bare loop, compiled": bare(True),
    "30B-A3B blocks, bf16, compiled": blocks("bf16", "run.compile=true", of=of_30b_a3b),
    "8B blocks, fp8, compiled": blocks("fp8", "run.compile=true"),
}
