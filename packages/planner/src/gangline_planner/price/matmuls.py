"""Time of a matmul: a roofline (Williams, Waterman and Patterson, CACM 52, 2009) with a fixed overhead.

A matmul of f FLOPs takes (f + half) / throughput, plus the time to read or write each operand once. `half` is the
overhead at the start and end of a matmul (launch, pipeline fill, last wave of tiles), in FLOPs. Both times are
added: tiles that wait for operands do not multiply, and measured grouped matmuls of few rows take the sum, not the
maximum (SimuMax, configs/system/b200_bf16_ceperm.json, group_matmul). A weight gradient is added to the gradient sum
of earlier microbatches, which is read and written.

Before matmuls in 8 or 4 bits, operands are cast: they are read once and written twice, by rows and by columns. The
norms and gates of the vendor's kernels (Transformer Engine) write low-precision values themselves, without a cast.

Attention reaches its full rate only with many keys. `attention.half` is the overhead of launches and of half-masked
tiles, as a number of additional keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gangline.explain.explained import Kernels
from gangline.model.matmuls import AnyMatmul, AttentionMatmuls, Matmul
from gangline_basics.cluster.file import Cluster

Pass = Literal["forward", "inputs", "weights"]
BACKWARD = 2.5  # operations of fused attention, backward over forward pass (Dao, arXiv 2307.08691, section 3.1)


@dataclass(frozen=True)
class Rates:
    """Rates of an accelerator for one number format of matmuls, from the numbers of a cluster file.

    wide, narrow  operations per second of large matmuls in 16 bits (or the run's higher precision), and in the format
                  of the matmuls of blocks
    half          overhead of a matmul, as a number of operations; attention_half: of attention, as a number of keys
    memory        memory bandwidth in bytes per second
    """

    wide: float
    narrow: float
    half: float
    memory: float
    attention: float
    attention_backward: float
    attention_half: float
    attention_width: float = 0.0
    cast: float = 0.0  # bytes moved per number by a cast kernel; 0 if there is no cast kernel
    itemsize: int = 2
    narrow_itemsize: float = 2  # bytes per number in operands of the matmuls of blocks
    gradient: int = 4  # bytes per number in the gradient sum

    @classmethod
    def of(cls, cluster: Cluster, matmul_format: str, kernels: Kernels = "fused") -> Rates:
        """Return the rates; matmul_format, kernels: see `Explained`. Raises UserError if the cluster lacks a number."""
        plain = matmul_format if matmul_format in ("fp64", "fp32", "fp16") else "bf16"
        efficiency = cluster["matmul.efficiency"]
        own = cluster[f"matmul.efficiency_{matmul_format}"] if matmul_format in ("fp8", "fp4") else efficiency
        own_kernel = (cluster.get("attention.vendor") or 1.0) if kernels == "vendor" else 1.0
        return cls(
            wide=cluster[f"peak.{plain}"] * efficiency,
            narrow=cluster[f"peak.{matmul_format}"] * own,
            half=cluster["matmul.half"],
            memory=cluster["memory.bandwidth"] * cluster["memory.efficiency"],
            attention=cluster[f"peak.{plain}"] * cluster["attention.efficiency"] * own_kernel,
            attention_backward=cluster[f"peak.{plain}"] * cluster["attention.efficiency_backward"] * own_kernel,
            attention_half=cluster["attention.half"],
            attention_width=cluster.get("attention.width") or 0.0,
            cast=0.0 if kernels == "vendor" else {"fp8": 2.0, "fp4": 1.0}.get(matmul_format, 0.0),
            narrow_itemsize={"fp8": 1, "fp4": 0.5}.get(matmul_format, 2),
        )


def compute_matmul_seconds(matmul: Matmul, rates: Rates, what: Pass = "forward") -> float:
    """Return the seconds of one matmul: forward, of its input gradient (`inputs`) or weight gradient (`weights`)."""
    rate = rates.narrow if matmul.block else rates.wide
    weights = matmul.matrices * matmul.inner * matmul.columns
    read = rates.narrow_itemsize if matmul.block else rates.itemsize
    if what == "weights":
        traffic = matmul.rows * (matmul.inner + matmul.columns) * read + weights * 2 * rates.gradient
    else:
        into, out = (matmul.inner, matmul.columns) if what == "forward" else (matmul.columns, matmul.inner)
        traffic = matmul.rows * (into * read + out * rates.itemsize) + weights * read
    cast = matmul.rows * {"forward": matmul.inner, "inputs": matmul.columns, "weights": 0}[what] * rates.cast
    return (matmul.flops + rates.half) / rate + (traffic + matmul.block * cast) / rates.memory


def compute_attention_seconds(matmul: AttentionMatmuls, rates: Rates, backward: bool = False) -> float:
    """Return the seconds of one fused attention pass, without the scores that the causal mask hides."""
    keys = min(matmul.keys, matmul.window or matmul.keys)
    flops = matmul.flops * matmul.visible * (1 + rates.attention_half / keys)
    flops *= 1 + rates.attention_width / matmul.head_dim
    if backward:
        return (BACKWARD * flops + rates.half) / rates.attention_backward
    return (flops + rates.half) / rates.attention


def compute_forward_seconds(matmuls: Mapping[AnyMatmul, int], rates: Rates) -> float:
    """Return the seconds of the forward passes of matmuls and attentions. matmuls: matmul -> number of calls."""
    return sum(
        times
        * (compute_attention_seconds(p, rates) if isinstance(p, AttentionMatmuls) else compute_matmul_seconds(p, rates))
        for p, times in matmuls.items()
    )


def compute_input_seconds(matmuls: Mapping[AnyMatmul, int], rates: Rates) -> float:
    """Return the seconds of input gradients; for attention, which has no weights, of the complete backward pass."""
    return sum(
        times
        * (
            compute_attention_seconds(p, rates, backward=True)
            if isinstance(p, AttentionMatmuls)
            else compute_matmul_seconds(p, rates, "inputs")
        )
        for p, times in matmuls.items()
    )


def compute_weight_seconds(matmuls: Mapping[AnyMatmul, int], rates: Rates) -> float:
    """Return the seconds of weight gradients. matmuls: matmul -> number of calls."""
    return sum(n * compute_matmul_seconds(p, rates, "weights") for p, n in matmuls.items() if isinstance(p, Matmul))
