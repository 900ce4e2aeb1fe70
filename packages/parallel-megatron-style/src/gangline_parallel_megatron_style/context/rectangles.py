"""Attention within documents without a mask: the visible part of each document is a rectangle of queries and keys.

In a block of ring attention a query sees keys of its own document: all of them, or in the block of the rank's own keys
only keys up to the query. The tokens of a document are consecutive, so queries and keys of a document are a rectangle,
which needs no mask. On a CPU the flash kernel computes one rectangle after another; a GPU computes segments
(`gangline_parallel_megatron_style.context.varlen`).

B batch, H query heads, K key and value heads, T queries, S keys, C width of a head
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gangline_parallel_megatron_style.context.blocks import Kernel


class Rectangle(NamedTuple):
    """Ranges [from, to) of batch rows, queries and keys; in each row the queries and keys are of one document."""

    row: int
    row_end: int
    query: int
    query_end: int
    key: int
    key_end: int


def find_rectangles(document_BT: Tensor, document_BS: Tensor) -> tuple[Rectangle, ...] | None:
    """Return the rectangles of queries and keys with the same document number; None if numbers decrease in a row."""
    queries, keys = document_BT.numpy(), document_BS.numpy()
    if (np.diff(queries) < 0).any() or (np.diff(keys) < 0).any():
        return None
    rows = [_split_row(q, k) for q, k in zip(queries, keys, strict=True)]
    rectangles, first = [], 0
    for row in range(1, len(rows) + 1):
        if row == len(rows) or rows[row] != rows[first]:
            rectangles += [Rectangle(first, row, *place) for place in rows[first]]
            first = row
    return tuple(rectangles)


def _split_row(queries: np.ndarray, keys: np.ndarray) -> list[tuple[int, int, int, int]]:
    numbers = np.intersect1d(queries, keys)
    at = [np.searchsorted(run, numbers, side=side) for run in (queries, keys) for side in ("left", "right")]
    return [tuple(place) for place in np.stack(at, axis=1).tolist()]


def make_rectangle_kernel(places: tuple[Rectangle, ...], inner: Kernel) -> Kernel:
    """Make a kernel that runs `inner` on one rectangle after another, without a mask.

    The kernel's `causal` needs rectangles with as many keys as queries: query i of a rectangle sees its keys 0 to i.
    """

    def forward(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, visible: Tensor | None, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        for place in places:
            here, lse_here = inner.forward(
                _select_queries(q, place), _select_keys(k, place), _select_keys(v, place), causal, None, scale
            )
            _select_queries(out, place).copy_(here)
            _select_queries(lse, place).copy_(lse_here)
        return out, lse

    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        visible: Tensor | None,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for place in places:
            of_queries = (_select_queries(x, place) for x in (dout, q))
            keys = (_select_keys(x, place) for x in (k, v))
            rows = (_select_queries(x, place) for x in (out, lse))
            gradients = inner.backward(*of_queries, *keys, *rows, causal, None, scale)
            _select_queries(dq, place).copy_(gradients[0])
            _select_keys(dk, place).copy_(gradients[1])
            _select_keys(dv, place).copy_(gradients[2])
        return dq, dk, dv

    return Kernel(forward, backward)


def _select_queries(x: Tensor, place: Rectangle) -> Tensor:
    return x[place.row : place.row_end, :, place.query : place.query_end]


def _select_keys(x: Tensor, place: Rectangle) -> Tensor:
    return x[place.row : place.row_end, :, place.key : place.key_end]
