"""How long a product takes: a roofline with a ramp.

A product of f operations takes (f + half) / rate, where `half` are the operations that its start and its ragged end
cost (launch, fill of the pipeline, the last wave of tiles); and never less than its operands take to cross memory once
(Williams, Waterman and Patterson, "Roofline", CACM 52, 2009).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gangline.cluster import Cluster
from gangline.explain import AttentionProduct, MatrixProduct, Product

BACKWARD = 2.5  # operations of fused attention's backward pass to one forward pass (Dao, arXiv 2307.08691, section 3.1)


@dataclass(frozen=True)
class Rates:
    """A cluster's numbers as seconds need them.

    wide, narrow  operations a second of large products in 16 bits, and in the format of blocks' products
    """

    wide: float
    narrow: float
    half: float
    memory: float
    attention: float
    attention_backward: float
    itemsize: int = 2

    @classmethod
    def of(cls, cluster: Cluster, products: str) -> Rates:
        """products: as `gangline.explain.Explained` names their format. Raises UserError where the file lacks it."""
        plain = products if products in ("fp64", "fp32", "fp16") else "bf16"
        efficiency = cluster["matmul.efficiency"]
        own = cluster[f"matmul.efficiency_{products}"] if products in ("fp8", "fp4") else efficiency
        return cls(
            wide=cluster[f"peak.{plain}"] * efficiency,
            narrow=cluster[f"peak.{products}"] * own,
            half=cluster["matmul.half"],
            memory=cluster["memory.bandwidth"] * cluster["memory.efficiency"],
            attention=cluster[f"peak.{plain}"] * cluster["attention.efficiency"],
            attention_backward=cluster[f"peak.{plain}"] * cluster["attention.efficiency_backward"],
        )


def matmul_seconds(product: MatrixProduct, rates: Rates) -> float:
    """One product, forward; that of an input's gradient or a weight's takes as long."""
    rate = rates.narrow if product.block else rates.wide
    numbers = product.rows * (product.inner + product.columns) + product.matrices * product.inner * product.columns
    return max((product.flops + rates.half * product.matrices) / rate, numbers * rates.itemsize / rates.memory)


def attention_seconds(product: AttentionProduct, rates: Rates, backward: bool = False) -> float:
    """Fused attention, what causality hides passed over."""
    flops = product.flops * product.visible
    if backward:
        return (BACKWARD * flops + rates.half) / rates.attention_backward
    return (flops + rates.half) / rates.attention


def forward_seconds(products: Mapping[Product, int], rates: Rates) -> float:
    """All of these, forward."""
    return sum(
        times * (attention_seconds(p, rates) if isinstance(p, AttentionProduct) else matmul_seconds(p, rates))
        for p, times in products.items()
    )


def input_seconds(products: Mapping[Product, int], rates: Rates) -> float:
    """The gradients of what goes in; attention's whole backward pass, which has no weight."""
    return sum(
        times
        * (attention_seconds(p, rates, backward=True) if isinstance(p, AttentionProduct) else matmul_seconds(p, rates))
        for p, times in products.items()
    )
