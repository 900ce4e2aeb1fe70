"""Ends of the documents of a batch, which the host often knows before the device has the batch.

B batch, T tokens
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_told = WeakTensorKeyDictionary()  # tensor of document numbers on a device -> ends of documents


def find_ends(document_BT: Tensor) -> Tensor:
    """Return the ends of documents over all rows, b·T + e, including every row's end: (n,) int32 in host memory."""
    last = torch.ones_like(document_BT, dtype=torch.bool)
    last[:, :-1] = document_BT[:, 1:] != document_BT[:, :-1]
    return (last.flatten().nonzero().flatten() + 1).to("cpu", torch.int32)


def tell_ends(document_BT: Tensor, ends: Tensor) -> None:
    """Store the ends of documents that the host knows, so that `get_ends` does not wait for the device."""
    if document_BT.device.type != "cpu":
        _told[document_BT] = ends


def get_ends(document_BT: Tensor) -> Tensor | None:
    """Return the ends that `tell_ends` stored for this tensor; None if it stored none."""
    ends: Tensor | None = _told.get(document_BT)
    return ends
