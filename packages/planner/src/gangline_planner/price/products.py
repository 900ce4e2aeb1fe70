"""Time of a matmul: a roofline (Williams, Waterman and Patterson, CACM 52, 2009) with a fixed overhead.

A matmul of f operations takes (f + half) / rate, plus the time in which its operands cross memory once. `half` is the
overhead at the start and end of a matmul (launch, pipeline fill, last wave of tiles), as a number of operations. Both
times are added: tiles that wait for operands do not multiply, and measured grouped matmuls of few rows take the sum,
not the maximum (SimuMax, configs/system/b200_bf16_ceperm.json, group_matmul). A weight gradient is added to the
gradient sum of earlier microbatches, which is read and written.

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
from gangline.model.products import AttentionProduct, MatrixProduct, Product
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
    def of(cls, cluster: Cluster, products: str, kernels: Kernels = "fused") -> Rates:
        """Return the rates; products, kernels: see `Explained`. Raises UserError if the cluster lacks a number."""
        plain = products if products in ("fp64", "fp32", "fp16") else "bf16"
        efficiency = cluster["matmul.efficiency"]
        own = cluster[f"matmul.efficiency_{products}"] if products in ("fp8", "fp4") else efficiency
        own_kernel = (cluster.get("attention.vendor") or 1.0) if kernels == "vendor" else 1.0
        return cls(
            wide=cluster[f"peak.{plain}"] * efficiency,
            narrow=cluster[f"peak.{products}"] * own,
            half=cluster["matmul.half"],
            memory=cluster["memory.bandwidth"] * cluster["memory.efficiency"],
            attention=cluster[f"peak.{plain}"] * cluster["attention.efficiency"] * own_kernel,
            attention_backward=cluster[f"peak.{plain}"] * cluster["attention.efficiency_backward"] * own_kernel,
            attention_half=cluster["attention.half"],
            attention_width=cluster.get("attention.width") or 0.0,
            cast=0.0 if kernels == "vendor" else {"fp8": 2.0, "fp4": 1.0}.get(products, 0.0),
            narrow_itemsize={"fp8": 1, "fp4": 0.5}.get(products, 2),
        )


def compute_matmul_seconds(product: MatrixProduct, rates: Rates, what: Pass = "forward") -> float:
    """Return the seconds of one matmul: forward, of its input gradient (`inputs`) or weight gradient (`weights`)."""
    rate = rates.narrow if product.block else rates.wide
    weights = product.matrices * product.inner * product.columns
    read = rates.narrow_itemsize if product.block else rates.itemsize
    if what == "weights":
        traffic = product.rows * (product.inner + product.columns) * read + weights * 2 * rates.gradient
    else:
        into, out = (product.inner, product.columns) if what == "forward" else (product.columns, product.inner)
        traffic = product.rows * (into * read + out * rates.itemsize) + weights * read
    cast = product.rows * {"forward": product.inner, "inputs": product.columns, "weights": 0}[what] * rates.cast
    return (product.flops + rates.half) / rate + (traffic + product.block * cast) / rates.memory


def compute_attention_seconds(product: AttentionProduct, rates: Rates, backward: bool = False) -> float:
    """Return the seconds of one fused attention pass, without the scores that the causal mask hides."""
    keys = min(product.keys, product.window or product.keys)
    flops = product.flops * product.visible * (1 + rates.attention_half / keys)
    flops *= 1 + rates.attention_width / product.head_dim
    if backward:
        return (BACKWARD * flops + rates.half) / rates.attention_backward
    return (flops + rates.half) / rates.attention


def compute_forward_seconds(products: Mapping[Product, int], rates: Rates) -> float:
    """Return the seconds of the forward passes of matmuls and attentions. products: product -> number of calls."""
    return sum(
        times
        * (compute_attention_seconds(p, rates) if isinstance(p, AttentionProduct) else compute_matmul_seconds(p, rates))
        for p, times in products.items()
    )


def compute_input_seconds(products: Mapping[Product, int], rates: Rates) -> float:
    """Return the seconds of input gradients; for attention, which has no weights, of the complete backward pass."""
    return sum(
        times
        * (
            compute_attention_seconds(p, rates, backward=True)
            if isinstance(p, AttentionProduct)
            else compute_matmul_seconds(p, rates, "inputs")
        )
        for p, times in products.items()
    )


def compute_weight_seconds(products: Mapping[Product, int], rates: Rates) -> float:
    """Return the seconds of weight gradients. products: product -> number of calls."""
    return sum(
        n * compute_matmul_seconds(p, rates, "weights") for p, n in products.items() if isinstance(p, MatrixProduct)
    )
