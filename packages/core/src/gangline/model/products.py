"""Matmuls and attention of modules as shapes: the work of a forward pass, to be converted to time. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MatrixProduct:
    """Matmul (rows x inner) times (inner x columns), forward, of one microbatch on one rank.

    weight    name of the node's parameter that is multiplied
    block     whether it is in a block: a precision computes these matmuls in fewer bits
    matrices  number of equal runs that the rows are split into, each with its own matrix; 1: one matrix for all
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
class AttentionProduct:
    """Attention, forward: queries with keys, and their weights with values, in `sequences` of each `heads` heads.

    queries and keys are those of one sequence on one rank; under a window no query has more than `window` keys.
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
    ) -> AttentionProduct:
        """Return the attention of `tokens` tokens: complete sequences, or a part of one whose keys are all there."""
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
        """Operations without a discount for causality, as MFU counts them (`gangline.model.flops`)."""
        return 4 * self.sequences * self.queries * min(self.keys, self.window or self.keys) * self.heads * self.head_dim

    @property
    def visible(self) -> float:
        """Share of `flops` that a kernel computes if it skips keys hidden by causality, 0 to 1."""
        keys = min(self.keys, self.window or self.keys)
        return (self.keys + 1) / (2 * self.keys) if self.causal and keys == self.keys else 1.0


Product = MatrixProduct | AttentionProduct


def list_products(shapes: Mapping[str, tuple[int, ...]], tokens: int) -> tuple[MatrixProduct, ...]:
    """Return the matmul of each matrix (out, in) in `shapes` with every token; other shapes are left out."""
    return tuple(
        MatrixProduct(rows=tokens, inner=shape[1], columns=shape[0], weight=name)
        for name, shape in shapes.items()
        if len(shape) == 2
    )
