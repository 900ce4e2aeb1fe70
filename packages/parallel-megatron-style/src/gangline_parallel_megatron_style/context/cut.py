"""Which tokens of a sequence a rank holds."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gangline.batch import Batch

Order = Literal["zigzag", "contiguous"]


def cut_tokens(x: Tensor, index: int, size: int, order: Order) -> Tensor:
    """(B, T, ...) -> (B, T / size, ...): what rank `index` holds.

    zigzag      of 2·size chunks number `index` from the front and number `index` from the back: under a causal mask
                every rank has the same work (for ring attention)
    contiguous  a run (for Ulysses)
    Raises ValueError where T does not divide.
    """
    chunks = 2 * size if order == "zigzag" else size
    if x.shape[1] % chunks:
        raise ValueError(
            f"{x.shape[1]} tokens do not divide into the {chunks} chunks that {size} ranks along cp need ({order})"
        )
    parts = x.chunk(chunks, dim=1)
    return torch.cat((parts[index], parts[chunks - 1 - index]), dim=1) if order == "zigzag" else parts[index]


def cut_batch(batch: Batch, index: int, size: int, order: Order) -> Batch:
    """The batch with this rank's tokens; positions and documents travel with them. What has no sequence stays.

    How many of the part count, and where its documents end, the host does not know.
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
