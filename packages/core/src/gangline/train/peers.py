"""Broadcast of a rank's batches to its peers: the ranks with equal samples, along tensor, context or pipeline axes.

Measured on a busy machine of two cores (benchmarks/peers.py: 4 ranks over gloo, tokens in memory, 2 bytes each): if
each rank prefetches for itself a step waits 0.6, 1.0 and 1.1 ms for 1, 16 and 64 sequences of 2048 tokens; with the
broadcast 8.9, 6.4 and 13.6 ms, because ranks wait for each other. So each rank reads, unless its source is `shared`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gangline.comm.base import Comm
from gangline.data.reader import StoredBatch
from gangline.errors import PeerFailed
from gangline.shard import name_dtype

_FIELDS = ("tokens", "sample", "ends", "loss_mask", "document", "position", "filled")
_ALIGNED = 8  # alignment in bytes, so that every tensor can be viewed in its own dtype


def hand_over(batches: Sequence[StoredBatch] | Exception | None, peers: Comm) -> list[StoredBatch]:
    """Return the batches that the first peer read, on all peers, by two broadcasts between hosts.

    batches: the first peer passes its batches, or the error of its reader, and then raises the error; other peers pass
    None, and raise PeerFailed.
    """
    content = b"" if batches is None else _pack(batches)
    size = torch.tensor([len(content)], dtype=torch.int64)
    peers.broadcast(size, 0)
    buffer = (
        torch.empty(int(size), dtype=torch.uint8) if batches is None else torch.frombuffer(content, dtype=torch.uint8)
    )
    peers.broadcast(buffer, 0)
    if isinstance(batches, Exception):
        raise batches
    return list(batches) if batches is not None else _unpack(buffer)


def _pack(batches: Sequence[StoredBatch] | Exception) -> bytearray:
    """Return the batches as bytes: the length of a JSON header, the header, and the bytes of every tensor."""
    if isinstance(batches, Exception):
        return _add_head({"error": f"{type(batches).__name__}: {batches}"}, ())
    tensors = [tensor for batch in batches for tensor in _to_tensors(batch).values()]
    head = [
        {
            "counted": batch.counted,
            "tensors": {name: [name_dtype(x.dtype), list(x.shape)] for name, x in _to_tensors(batch).items()},
        }
        for batch in batches
    ]
    return _add_head(head, tensors)


def _add_head(head: Any, tensors: Sequence[Tensor]) -> bytearray:
    line = json.dumps(head).encode()
    content = bytearray(np.int64(len(line)).tobytes() + line)
    for tensor in tensors:
        content += bytes(-len(content) % _ALIGNED)
        content += tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return content


def _unpack(held: Tensor) -> list[StoredBatch]:
    length = int(held[:_ALIGNED].view(torch.int64))
    head = json.loads(bytes(held[_ALIGNED : _ALIGNED + length].numpy()))
    if isinstance(head, dict):
        raise PeerFailed(f"the rank that reads the batches of this rank failed: {head['error']}")
    at, batches = _ALIGNED + length, []
    for entry in head:
        tensors = {}
        for name, (kind, shape) in entry["tensors"].items():
            dtype = getattr(torch, kind)
            at += -at % _ALIGNED
            size = int(np.prod(shape)) * dtype.itemsize
            tensors[name] = held[at : at + size].view(dtype).view(shape)
            at += size
        fields = {name: tensors.pop(name) for name in _FIELDS if name in tensors}
        extra = {name.removeprefix("extra/"): x for name, x in tensors.items()}
        batches.append(StoredBatch(**fields, counted=entry["counted"], extra=extra))
    return batches


def _to_tensors(batch: StoredBatch) -> dict[str, Tensor]:
    tensors = {name: x for name in _FIELDS if (x := getattr(batch, name)) is not None}
    return tensors | {f"extra/{name}": x for name, x in batch.extra.items()}
