"""Matmuls and attention of modules as shapes: the work of a forward pass, for estimates of time. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """Matmul (rows x inner) times (inner x columns) in the forward pass of one microbatch on one rank.

    weight    name of the node's parameter in the matmul
    block     whether the matmul is in a block, so that a low-bit precision applies to it
    matrices  number of equal groups of rows, each multiplied with its own matrix (grouped GEMM); 1: one matrix
    """

    rows: int
    inner: int
    columns: int
    weight: str = "weight"
    matrices: int = 1
    block: bool = True

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.columns


@dataclass(frozen=True, kw_only=True)
class AttentionMatmuls:
    """Both matmuls of attention (scores, and scores with values) in the forward pass of `sequences` sequences.

    queries, keys: number per sequence on one rank, for each of `heads` heads; a query reads at most `window` keys.
    """

    sequences: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None

    @classmethod
    def of_tokens(
        cls,
        tokens: int,
        sequence_length: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        causal: bool = True,
        window: int | None = None,
    ) -> AttentionMatmuls:
        """Return the attention of `tokens` tokens: full sequences, or some queries of one sequence and all its keys."""
        return cls(
            sequences=max(1, tokens // sequence_length),
            queries=min(tokens, sequence_length),
            keys=sequence_length,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            causal=causal,
            window=window if window and window < sequence_length else None,
        )

    @property
    def flops(self) -> int:
        """FLOPs without a discount for causality, by MFU's convention (`gangline.model.flops`)."""
        return 4 * self.sequences * self.queries * min(self.keys, self.window or self.keys) * self.heads * self.head_dim

    @property
    def visible(self) -> float:
        """Fraction of `flops` that a kernel computes if it skips causally masked keys, 0 to 1."""
        keys = min(self.keys, self.window or self.keys)
        return (self.keys + 1) / (2 * self.keys) if self.causal and keys == self.keys else 1.0


AnyMatmul = Matmul | AttentionMatmuls


def list_matmuls(shapes: Mapping[str, tuple[int, ...]], tokens: int) -> tuple[Matmul, ...]:
    """Return the matmuls of `tokens` tokens with each matrix (out, in) in `shapes`; skip shapes of other dims."""
    return tuple(
        Matmul(rows=tokens, inner=shape[1], columns=shape[0], weight=name)
        for name, shape in shapes.items()
        if len(shape) == 2
    )
