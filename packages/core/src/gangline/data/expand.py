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
    """Return the microbatch on `device`, in new memory; the host does not wait for a GPU.

    Tokens are copied in their stored dtype and then cast. The host counts valid targets before it copies the mask.
    """
    tokens = send(stored.tokens, device, torch.int64)
    B, T = tokens.shape[0], tokens.shape[1] - 1
    mask = torch.ones(B, T, dtype=torch.bool, device=device)
    if stored.loss_mask is not None:
        mask = send(stored.loss_mask, device, torch.bool)
    elif stored.ends is not None:
        mask.view(-1)[send(stored.ends, device, torch.int64) - 1] = False
    if stored.counted is not None:
        mask[stored.counted :] = False
    document = ends = None
    position = torch.arange(T, device=device).expand(B, T)
    if stored.ends is not None:
        ends = _add_rows(stored.ends, B, T)
        document, position = _derive(ends, B, T, device)
    if stored.document is not None:
        document = send(stored.document, device, torch.int64)
    if stored.position is not None:
        position = send(stored.position, device, torch.int64)
    padding = None
    if stored.filled is not None:
        padding = torch.arange(T, device=device) >= send(stored.filled, device, torch.int64)[:, None]
    if document is not None and ends is not None and stored.document is None:
        tell_ends(document, ends)
    return Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_mask=mask,
        position=position,
        sample=send(stored.sample, device),
        document=document,
        padding=padding,
        ends=ends,
        step=step,
        valid=None if device.type == "cpu" else count(stored),
        extra={name: send(x, device) for name, x in stored.extra.items()},
    )


def send(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy on the device, through pinned memory, from which a copy to a GPU does not block the host."""
    if x.device.type == "cpu" and device.type == "cuda" and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, dtype, non_blocking=True, copy=True)


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
    number, starts = _find_repeated(torch.stack((number, starts, ends - starts)), B * T, device)
    return number.view(B, T), (torch.arange(B * T, device=device) - starts).view(B, T)


def _find_repeated(x: Tensor, total: int, device: torch.device) -> Tensor:
    """Return rows x[:-1] (k, n) as (k, total) on the device, with column j repeated `x[-1, j]` times."""
    if device.type == "cpu":  # on the CPU torch gathers by index, many times slower than numpy
        return torch.from_numpy(np.repeat(x[:-1].numpy(), x[-1].numpy(), axis=1))
    x = send(x, device)
    return x[:-1].repeat_interleave(x[-1], dim=1, output_size=total)


def _add_rows(ends: Tensor, B: int, T: int) -> Tensor:
    """Return the ends of the batch's documents, including the end of every row, ascending: (n,) int32."""
    rows = torch.arange(1, B + 1, dtype=torch.int32) * T
    return torch.cat((ends, rows)).unique()
