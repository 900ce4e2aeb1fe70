"""Where the documents of a batch end, which the host often knows before the device has it.

B batch, T tokens
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_told = WeakTensorKeyDictionary()  # documents on a device -> where they end


def find_ends(document_BT: Tensor) -> Tensor:
    """(n,) int32, in the host's memory: where documents end in rows one after another, every row's end among them."""
    last = torch.ones_like(document_BT, dtype=torch.bool)
    last[:, :-1] = document_BT[:, 1:] != document_BT[:, :-1]
    return (last.flatten().nonzero().flatten() + 1).to("cpu", torch.int32)


def tell_ends(document_BT: Tensor, ends: Tensor) -> None:
    """The host knows where these documents end, so that nobody has to wait for their device to say it."""
    if document_BT.device.type != "cpu":
        _told[document_BT] = ends


def get_ends(document_BT: Tensor) -> Tensor | None:
    """What `tell_ends` said of them; None: nothing."""
    ends: Tensor | None = _told.get(document_BT)
    return ends
