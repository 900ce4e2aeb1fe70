"""Context parallelism's split of a sequence: the tokens that each rank holds."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gangline.batch import Batch

Response = Literal["zigzag", "contiguous"]


def cut_tokens(x: Tensor, index: int, size: int, order: Response) -> Tensor:
    """Return the tokens of rank `index`: (B, T, ...) -> (B, T / size, ...).

    zigzag      of 2·size chunks number `index` from the front and number `index` from the back: under a causal mask
                every rank has equal work (for ring attention)
    contiguous  a run of tokens (for Ulysses)
    Raises ValueError if T does not divide.
    """
    chunks = 2 * size if order == "zigzag" else size
    if x.shape[1] % chunks:
        raise ValueError(
            f"{x.shape[1]} tokens do not divide into the {chunks} chunks that {size} ranks along cp need ({order})"
        )
    parts = x.chunk(chunks, dim=1)
    return torch.cat((parts[index], parts[chunks - 1 - index]), dim=1) if order == "zigzag" else parts[index]


def cut_batch(batch: Batch, index: int, size: int, order: Response) -> Batch:
    """Return the batch with this rank's tokens, positions and documents; tensors without a sequence dim stay.

    The host does not know the part's number of valid tokens and document ends: `valid` and `ends` are None.
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
