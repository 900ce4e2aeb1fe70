"""From what a reader hands over to what a model looks at, on the device: widened, positions and documents derived.

B sequences, T tokens
"""

from __future__ import annotations

import torch
from torch import Tensor

from gangline.batch import Batch
from gangline.data.reader import StoredBatch
from gangline.model.documents import tell_ends


def expand(stored: StoredBatch, step: int, device: torch.device) -> Batch:
    """The microbatch on `device`, in memory of its own. From pinned memory the copies do not block.

    Tokens travel as they are stored. How many targets count the host knows before the mask leaves it.
    """
    tokens = stored.tokens.to(device, non_blocking=True).to(torch.int64, copy=True)
    B, T = tokens.shape[0], tokens.shape[1] - 1
    begins = None if stored.ends is None else _begins(stored.ends, B, T, device)
    if stored.loss_mask is not None:
        mask = stored.loss_mask.to(device, torch.bool, non_blocking=True, copy=True)
    elif begins is not None:
        mask = ~begins[:, 1:]
    else:
        mask = torch.ones(B, T, dtype=torch.bool, device=device)
    if stored.counted is not None:
        mask[stored.counted :] = False
    document = ends = None
    position = torch.arange(T, device=device).expand(B, T)
    if begins is not None:
        assert stored.ends is not None
        document, ends = begins[:, :-1].cumsum(1), _with_rows(stored.ends, B, T)
        if stored.position is None:
            position = position - torch.where(begins[:, :-1], position, 0).cummax(1).values
    if stored.document is not None:
        document = stored.document.to(device, torch.int64, non_blocking=True, copy=True)
    if stored.position is not None:
        position = stored.position.to(device, torch.int64, non_blocking=True, copy=True)
    if document is not None and ends is not None and stored.document is None:
        tell_ends(document, ends)
    return Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_mask=mask,
        position=position,
        sample=stored.sample.to(device, copy=True),
        document=document,
        ends=ends,
        step=step,
        valid=None if device.type == "cpu" else count(stored),
        extra={name: x.to(device, non_blocking=True, copy=True) for name, x in stored.extra.items()},
    )


def count(stored: StoredBatch) -> int:
    """How many targets of the microbatch count."""
    B, T = stored.tokens.shape[0], stored.tokens.shape[1] - 1
    rows = B if stored.counted is None else stored.counted
    if stored.loss_mask is not None:
        return int(stored.loss_mask[:rows].sum())
    return rows * T - (0 if stored.ends is None else int((stored.ends <= rows * T).sum()))


def _begins(ends: Tensor, B: int, T: int, device: torch.device) -> Tensor:
    """(B, T + 1) bool: before which tokens, the last target among them, another document begins."""
    ends = ends.to(device, torch.int64, non_blocking=True)
    row = (ends - 1).div(T, rounding_mode="floor")
    begins = torch.zeros(B * (T + 1), dtype=torch.bool, device=device)
    return begins.index_fill_(0, ends + row, True).view(B, T + 1)


def _with_rows(ends: Tensor, B: int, T: int) -> Tensor:
    """(n,) int32: the ends of documents of the batch, where every row ends one."""
    rows = torch.arange(1, B + 1, dtype=torch.int32) * T
    return torch.cat((ends, rows)).unique()
