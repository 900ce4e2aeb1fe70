"""Ends of the documents of a batch, which the host often knows before the device has it.

B batch, T tokens
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_told = WeakTensorKeyDictionary()  # documents on a device -> their ends


def find_ends(document_BT: Tensor) -> Tensor:
    """Return the ends of documents in rows one after another, every row's end included: (n,) int32 in host memory."""
    last = torch.ones_like(document_BT, dtype=torch.bool)
    last[:, :-1] = document_BT[:, 1:] != document_BT[:, :-1]
    return (last.flatten().nonzero().flatten() + 1).to("cpu", torch.int32)


def tell_ends(document_BT: Tensor, ends: Tensor) -> None:
    """Store the ends of these documents, known to the host, so that reading them does not wait for the device."""
    if document_BT.device.type != "cpu":
        _told[document_BT] = ends


def get_ends(document_BT: Tensor) -> Tensor | None:
    """Return the ends of these documents that `tell_ends` stored; None if there are none."""
    ends: Tensor | None = _told.get(document_BT)
    return ends
