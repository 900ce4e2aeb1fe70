"""Split of sequences over the ranks of context parallelism: the tokens of each rank."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gangline.batch import Batch

TokenOrder = Literal["zigzag", "contiguous"]


def cut_tokens(x: Tensor, index: int, size: int, order: TokenOrder) -> Tensor:
    """Return the tokens of rank `index` of `size`: (B, T, ...) -> (B, T / size, ...).

    order "zigzag": of 2·size chunks, chunk `index` from the front and chunk `index` from the back, for ring attention:
    every rank has equal work with a causal mask.
    order "contiguous": consecutive tokens, for Ulysses.
    Raises ValueError if the number of chunks does not divide T.
    """
    chunks = 2 * size if order == "zigzag" else size
    if x.shape[1] % chunks:
        raise ValueError(
            f"{x.shape[1]} tokens do not divide into {chunks} chunks, as {size} ranks along cp need ({order})"
        )
    parts = x.chunk(chunks, dim=1)
    return torch.cat((parts[index], parts[chunks - 1 - index]), dim=1) if order == "zigzag" else parts[index]


def cut_batch(batch: Batch, index: int, size: int, order: TokenOrder) -> Batch:
    """Return the batch with the tokens, positions and documents of rank `index`; tensors without (B, T) are unchanged.

    `valid` and `ends` of the result are None, because the host does not know the number of valid tokens and the
    document ends of a rank's part.
    """
    if size == 1:
        return batch
    shape = batch.shape
    own = partial(cut_tokens, index=index, size=size, order=order)
    changes: dict[str, Any] = {"valid": None, "ends": None, "rows": (batch, own)}
    for item in fields(batch):
        value = getattr(batch, item.name)
        if isinstance(value, Tensor) and value.shape[:2] == shape:
            changes[item.name] = own(value)
    return replace(batch, **changes)
