"""Expansion of a reader's batch on the device: cast tokens to int64, derive positions and documents.

B sequences, T tokens
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gangline.batch import Batch
from gangline.data.reader import StoredBatch
from gangline.model.document_ends import tell_ends


def expand(stored: StoredBatch, step: int, device: torch.device) -> Batch:
    """Return the microbatch on `device`, in new memory. From pinned memory the copies do not block.

    Tokens are copied in their stored dtype and then cast. The host counts valid targets before it copies the mask.
    """
    tokens = stored.tokens.to(device, non_blocking=True).to(torch.int64, copy=True)
    B, T = tokens.shape[0], tokens.shape[1] - 1
    mask = torch.ones(B, T, dtype=torch.bool, device=device)
    if stored.loss_mask is not None:
        mask = stored.loss_mask.to(device, torch.bool, non_blocking=True, copy=True)
    elif stored.ends is not None:
        mask.view(-1)[stored.ends.to(device, torch.int64, non_blocking=True) - 1] = False
    if stored.counted is not None:
        mask[stored.counted :] = False
    document = ends = None
    position = torch.arange(T, device=device).expand(B, T)
    if stored.ends is not None:
        ends = _add_rows(stored.ends, B, T)
        document, position = _derive(ends, B, T, device)
    if stored.document is not None:
        document = stored.document.to(device, torch.int64, non_blocking=True, copy=True)
    if stored.position is not None:
        position = stored.position.to(device, torch.int64, non_blocking=True, copy=True)
    padding = None
    if stored.filled is not None:
        padding = torch.arange(T, device=device) >= stored.filled.to(device, torch.int64, non_blocking=True)[:, None]
    if document is not None and ends is not None and stored.document is None:
        tell_ends(document, ends)
    return Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_mask=mask,
        position=position,
        sample=stored.sample.to(device, copy=True),
        document=document,
        padding=padding,
        ends=ends,
        step=step,
        valid=None if device.type == "cpu" else count(stored),
        extra={name: x.to(device, non_blocking=True, copy=True) for name, x in stored.extra.items()},
    )


def count(stored: StoredBatch) -> int:
    """Return the number of targets of the microbatch that count in the loss."""
    B, T = stored.tokens.shape[0], stored.tokens.shape[1] - 1
    rows = B if stored.counted is None else stored.counted
    if stored.loss_mask is not None:
        return int(stored.loss_mask[:rows].sum())
    return rows * T - (0 if stored.ends is None else int((stored.ends <= rows * T).sum()))


def _derive(ends: Tensor, B: int, T: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (documents from 0 in each row, positions from 0 in each document), both (B, T) on the device.

    The host does not wait for the device, because it knows the length of each document.
    """
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    row = starts.div(T, rounding_mode="floor")
    number = torch.arange(len(ends)) - torch.searchsorted(row, row)  # number of the document within its row
    few = torch.stack((number, starts)).to(torch.int64)
    number, starts = _find_repeated(few, ends - starts, B * T, device)
    return number.view(B, T), (torch.arange(B * T, device=device) - starts).view(B, T)


def _find_repeated(x: Tensor, counts: Tensor, total: int, device: torch.device) -> Tensor:
    """Return x (k, n) as (k, total) on the device, with column j repeated `counts[j]` times."""
    if device.type == "cpu":  # on the CPU torch gathers by index, many times slower than numpy
        return torch.from_numpy(np.repeat(x.numpy(), counts.numpy(), axis=1))
    return x.to(device).repeat_interleave(counts.to(device), dim=1, output_size=total)


def _add_rows(ends: Tensor, B: int, T: int) -> Tensor:
    """Return the ends of the batch's documents, including the end of every row, ascending: (n,) int32."""
    rows = torch.arange(1, B + 1, dtype=torch.int32) * T
    return torch.cat((ends, rows)).unique()
